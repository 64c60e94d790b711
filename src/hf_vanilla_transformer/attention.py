"""Attention: sections 3.2.1 and 3.2.2 of "Attention Is All You Need" (Vaswani et al. 2017).

Differences from the paper: a head size of its own (`head_dim`), biases on the projections and dropout of the weights
are possible; the paper has d_k = d_v = d_model / h and writes of neither biases nor dropout here.

Shapes: B batch, T target (query) length, S source (key) length, D d_model, H heads, K head size.
Masks: True = may attend.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .autocast import product_dtype


def scaled_dot_product_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Equation 1, softmax(Q K^T / sqrt(d_k)) V, with the weights in hand: the `eager` backend.

    Args:
        module: the calling layer; unused here, the other backends read from it.
        query: (B, H, T, K).
        key, value: (B, H, S, K).
        mask: broadcastable to (B, H, T, S); boolean with True = may attend, or numbers that are added to the scores,
            of which the smallest and -inf forbid. A query that may attend to nothing gets zeros, as in PyTorch's
            fused kernels.
        scaling: 1 / sqrt(d_k).
        dropout: probability of dropping a weight.

    Returns:
        the context (B, T, H, K) and the weights (B, H, T, S).
    """
    scores = query @ key.transpose(-2, -1) * scaling  # (B, H, T, S)
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:
        if mask.dtype == torch.bool:
            forbidden = mask.logical_not()
        else:
            forbidden = mask <= torch.finfo(mask.dtype).min
            scores = scores + mask.masked_fill(forbidden, 0.0)
        scores = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min)
        # A row without any allowed key is uniform after the softmax; the second fill turns it into zeros.
        weights = scores.softmax(dim=-1).masked_fill(forbidden, 0.0)
    context = nn.functional.dropout(weights, dropout) @ value  # (B, H, T, K)
    return context.transpose(1, 2), weights


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: h attention functions in parallel on learned projections of queries, keys and values.

    Args:
        d_model: width of the residual stream.
        num_heads: h.
        head_dim: d_k = d_v.
        dropout: on the attention weights.
        bias: whether the four projections have biases.
        is_causal: whether this is the decoder's self-attention. Read by backends that make the causal mask themselves
            where `mask` is None; `scaled_dot_product_attention` masks what `mask` says and nothing else.
        layer_idx: the layer's place in the cache.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        dropout: float,
        bias: bool,
        is_causal: bool = False,
        layer_idx: int = 0,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.scaling = head_dim**-0.5
        self.dropout = dropout
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * head_dim, d_model, bias=bias)

    def forward(
        self,
        hidden_states: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        past_key_values: Any = None,
        attend: Callable = scaled_dot_product_attention,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: where the queries come from, (B, T, D).
            memory: where keys and values come from, (B, S, D): the encoder's output, or None for self-attention.
                B may be a multiple of the batch of the keys, from the memory or from the cache: consecutive rows then
                are beams of one sentence and attend to the same keys, which exist once.
            mask: see `scaled_dot_product_attention`, or the form of another `attend`; its batch is that of the keys.
            past_key_values: a transformers `EncoderDecoderCache`, or None.
            attend: the attention function, with the signature of `scaled_dot_product_attention`.

        Returns:
            (B, T, D), and the weights (B, H, T, S) if `attend` computes them.
        """
        batch, length, _ = hidden_states.shape
        hidden_states = self._cast(hidden_states)
        key, value = self._keys_and_values(hidden_states, memory, past_key_values)
        beams = batch // key.shape[0]
        if beams > 1:  # the beams of a sentence are so many more queries to its keys
            hidden_states = hidden_states.reshape(key.shape[0], beams * length, -1)
        query = self._split_heads(self.q_proj(hidden_states))
        dropout = self.dropout if self.training else 0.0
        context, weights = attend(self, query, key, value, mask, scaling=self.scaling, dropout=dropout)
        output = self.out_proj(context.reshape(batch, length, -1))
        if beams > 1 and weights is not None:
            weights = weights.unflatten(2, (beams, length)).transpose(1, 2).flatten(0, 1)
        return output, weights

    def _keys_and_values(
        self, hidden_states: Tensor, memory: Tensor | None, past_key_values: Any
    ) -> tuple[Tensor, Tensor]:
        """Project keys and values, (B, H, S, K) each, or take what the cache already knows."""
        if memory is None:
            key, value = self._project(hidden_states)
            if past_key_values is not None:
                key, value = past_key_values.self_attention_cache.update(key, value, self.layer_idx)
            return key, value
        if past_key_values is None:
            return self._project(memory)
        cache = past_key_values.cross_attention_cache
        if not past_key_values.is_updated.get(self.layer_idx):
            key, value = cache.update(*self._project(memory), self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
            return key, value
        return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values

    def _project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        states = self._cast(states)
        return self._split_heads(self.k_proj(states)), self._split_heads(self.v_proj(states))

    @staticmethod
    def _cast(states: Tensor) -> Tensor:
        """Cast once: autocast would cast the same states in each projection and keep every copy for the backward pass.

        The gradients of the projections are then added in the cast type, too.
        """
        dtype = product_dtype(states)
        return states if states.dtype == dtype else states.to(dtype)  # a cast to the same type would stay in graphs

    def _split_heads(self, projected: Tensor) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K). H is inferred: under tensor parallelism a rank holds only some heads."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
