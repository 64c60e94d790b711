"""The attention backends of transformers: a mask in the form of each, and one message for what a backend cannot do.

| backend | mask | attention weights | `attention_dropout` | static cache |
|---|---|---|---|---|
| `eager` | (B, 1, T, S) of 0 and the smallest number | returned | yes | yes |
| `sdpa` | (B, 1, T, S) of booleans; None where nothing is masked | no | yes | yes |
| `flex_attention` | `BlockMask` | no | no | no |
| `flash_attention_2` | `Packing`; None where nothing is padded | no | yes | yes |
| `flash_attention_3` and newer | the same | no | no | yes |

Every backend gives the same output at every real token, with padding on any side, and zeros to a query that may attend
to nothing. At a padded position, which nobody reads, FlashAttention gives zeros and the others whatever comes out.

Shapes: B batch, T target (query) length, S source (key) length, D d_model, H heads, K head size.
"""

import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.utils.generic import is_flash_attention_requested

from .cpu_attention import short_attention, short_attention_applies, widens
from .errors import UserError


class Packing(NamedTuple):
    """Which queries and keys of a padded batch are real: FlashAttention's kernels know no mask, but sentences that lie
    end to end.

    Made once in a forward pass and used by every layer. transformers would make it in each layer, and would cut the
    decoder's queries of cross-attention by the padding of the source.

    Attributes:
        queries: rows and columns of the real queries in (B, T).
        keys: rows and columns of the real keys in (B, S).
        cu_seq_lens_q, cu_seq_lens_k: (B + 1,) 32-bit integers, where each sentence begins when they lie end to end.
        max_length_q, max_length_k: the most queries and keys of a sentence.
    """

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]
    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor) -> "Packing":
        """From booleans (B, T) and (B, S), True = real. A sentence without keys must have no queries."""
        lengths = torch.stack([queries.sum(dim=-1), keys.sum(dim=-1)])  # (2, B)
        starts = nn.functional.pad(lengths.cumsum(dim=-1), (1, 0)).int()
        places = (queries.nonzero(as_tuple=True), keys.nonzero(as_tuple=True))
        return cls(*places, *starts, *lengths.amax(dim=-1).tolist())


def bidirectional_mask(
    config: PreTrainedConfig, states: Tensor, padding: Tensor | None, memory: Tensor | None = None
) -> Any:
    """The mask of attention that looks everywhere: the encoder's, or the decoder's over the encoder's output.

    Args:
        config: names the backend.
        states: where the queries come from, (B, T, D).
        padding: (B, S), 1 = a real token; None means all; a mask of four dimensions passes as it is.
        memory: where the keys come from, (B, S, D); None means from `states`.
    """
    mask = create_bidirectional_mask(
        config=config, inputs_embeds=states, attention_mask=padding, encoder_hidden_states=memory
    )
    if not _is_padding(mask):
        return mask
    queries = mask if memory is None else mask.any(dim=-1, keepdim=True).expand(-1, states.shape[1])
    return Packing.of(queries, mask)


def causal_mask(config: PreTrainedConfig, states: Tensor, padding: Tensor | None, cache: Cache | None) -> Any:
    """The mask of attention that looks back only: the decoder's over its own input.

    Args:
        config: names the backend.
        states: where the queries come from, (B, T, D).
        padding: (B, past + T), 1 = a real token; None means all; a mask of four dimensions passes as it is.
        cache: what it holds (past tokens) are keys as well; None means no past.

    Raises:
        UserError: see `check_cache`.
    """
    check_cache(config, cache)
    batch, length, _ = states.shape
    if padding is None and cache is not None and is_flash_attention_requested(config):
        filled = int(cache.get_seq_length()) + length
        if cache.get_mask_sizes(length, 0)[0] > filled:  # a static cache has room, at which no kernel may look
            padding = states.new_ones(batch, filled, dtype=torch.bool)
    mask = create_causal_mask(config=config, inputs_embeds=states, attention_mask=padding, past_key_values=cache)
    return Packing.of(mask[:, -length:], mask) if _is_padding(mask) else mask


def _is_padding(mask: Any) -> bool:
    """Whether masking_utils has left the mask (B, S) as it came, which it does for FlashAttention only."""
    return isinstance(mask, Tensor) and mask.dim() == 2


def packed_attention(
    kernel: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Packing | None,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Tensor, None]:
    """FlashAttention with the signature of `attention.scaled_dot_product_attention`, `kernel` apart.

    Args:
        kernel: transformers' door to FlashAttention, which aligns a causal mask at the last query and the last key.

    Raises:
        UserError: 32-bit floats.
        ValueError: a mask of four dimensions.
    """
    if query.dtype == torch.float32 and module.q_proj.weight.dtype == torch.float32:
        raise UserError(
            "FlashAttention computes in 16 bits, the model has 32: load it with dtype='bfloat16', train with "
            "--bf16 true or choose attn_implementation='sdpa'"
        )
    if mask is None:
        return kernel(module, query, key, value, None, scaling=scaling, dropout=dropout)
    if not isinstance(mask, Packing):
        raise ValueError("FlashAttention takes masks of the shape (B, S) only: choose attn_implementation='sdpa'")
    context = query.new_zeros(query.transpose(1, 2).shape)  # (B, T, H, K)
    if mask.max_length_q > 0:
        places = (mask.queries, mask.keys, mask.keys)
        query, key, value = (
            states.transpose(1, 2)[real].transpose(0, 1)[None]  # (1, H, real, K)
            for states, real in zip((query, key, value), places, strict=True)
        )
        lengths = {name: getattr(mask, name) for name in Packing._fields[2:]}
        packed, _ = kernel(module, query, key, value, None, scaling=scaling, dropout=dropout, **lengths)
        context[mask.queries] = packed[0].to(context.dtype)
    return context, None


def sdpa_on_cpu(
    kernel: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Tensor, None]:
    """`sdpa`. On CPUs it is slow for sentences, and for bfloat16 where `widens`.

    Keys and values may be in float32 already beside a query in bfloat16: those that a search keeps.
    """
    if query.device.type != "cpu":
        return kernel(module, query, key, value, mask, scaling=scaling, dropout=dropout)
    if short_attention_applies(query, key, mask, dropout):
        return short_attention(query, key, value, mask, scaling, module.is_causal), None
    dtype = query.dtype
    if key.dtype == dtype and not widens(query, query.shape[2]):
        return kernel(module, query, key, value, mask, scaling=scaling, dropout=dropout)
    with torch.autocast("cpu", enabled=False):  # which would make bfloat16 of them again
        wide = [states.float() for states in (query, key, value)]
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        context, _ = kernel(module, *wide, mask, scaling=scaling, dropout=dropout)
    return context.to(dtype), None


def adapted(attend: Callable, name: str) -> Callable:
    """The backend `name`, found by transformers as `attend`, as this module calls it."""
    if is_flash_attention_requested(requested_attention_implementation=name):
        return partial(packed_attention, attend)
    return partial(sdpa_on_cpu, attend) if name == "sdpa" else attend


def check_abilities(name: str, dropout: float, output_attentions: bool | None) -> None:
    """Name what a backend would leave out without a word, or with a message that helps nobody.

    Args:
        name: of the backend.
        dropout: that attention is asked for: 0 outside training.
        output_attentions: whether somebody wants to see the attention weights.

    Raises:
        UserError: `name` cannot drop attention weights.

    Warns:
        UserWarning: `name` makes no attention weights. transformers goes on without them, and so do we.
    """
    if output_attentions and name != "eager":
        warnings.warn(
            f"output_attentions=True needs the weights, which {name!r} does not make: "
            "call model.set_attn_implementation('eager') first",
            stacklevel=2,
        )
    if dropout and not _can_drop(name):
        raise UserError(
            f"{name!r} cannot drop attention weights (attention_dropout={dropout}): train with attention_dropout=0 or "
            "attn_implementation='sdpa'"
        )


def check_cache(config: PreTrainedConfig, cache: Cache | None) -> None:
    """Refuse a static cache where it would give wrong results.

    flex_attention asks its mask where the queries begin while it computes, when the cache has already counted on.

    Raises:
        UserError: a static cache and flex_attention.
    """
    if config._attn_implementation == "flex_attention" and cache is not None and cache.is_compileable:
        raise UserError(
            "'flex_attention' cannot use a static cache: leave out cache_implementation or choose "
            "attn_implementation='sdpa'"
        )


def _can_drop(name: str) -> bool:
    if is_flash_attention_requested(requested_attention_implementation=name):
        (_, kernel, *_), _ = lazy_import_flash_attention(name)
        return "dropout_p" in signature(kernel).parameters
    return name != "flex_attention"
