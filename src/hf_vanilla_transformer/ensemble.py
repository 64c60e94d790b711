"""Several models that search together: at each step the next word's probability is the mean of theirs.

Shapes: B sentences, S source length, T target length, V vocabulary.
"""

from collections.abc import Sequence
from copy import deepcopy
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from .errors import UserError
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerPreTrainedModel,
)


class Ensemble(VanillaTransformerForConditionalGeneration):
    """`generate()` with the search of `VanillaTransformerForConditionalGeneration`; not for training.

    Sizes may differ, vocabularies must not: the same token ids have to mean the same to all.

    Args:
        members: at least one; the first one's `generation_config` counts.

    Raises:
        UserError: members that differ in vocabulary, special tokens, type or attention backend; an attempt to save it.
    """

    def __init__(self, members: Sequence[VanillaTransformerForConditionalGeneration]):
        for member in members[1:]:
            for (name, mine), other in zip(_shared(members[0]).items(), _shared(member).values(), strict=True):
                if mine != other:
                    raise UserError(f"models of an ensemble agree in this: {name} is {mine} and {other}")
        config = deepcopy(members[0].config)
        config.decoder_layers = sum(member.config.decoder_layers for member in members)  # whose states a cache holds
        config.max_position_embeddings = min(member.config.max_position_embeddings for member in members)
        VanillaTransformerPreTrainedModel.__init__(self, config)  # without weights of its own
        self.members = nn.ModuleList(members)
        self.generation_config = members[0].generation_config

    def save_pretrained(self, *args: Any, **kwargs: Any):
        raise UserError("an ensemble cannot be saved: save its members")

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        return _Encoders(member.get_encoder() for member in self.members)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        labels: None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """As the members do.

        Returns:
            logits: (B, T, V), logarithms of the mean probabilities, in float32.

        Raises:
            ValueError: `labels`, which have no loss here.
        """
        if labels is not None:
            raise ValueError("an ensemble is not trained: it has no loss of labels")
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids.ne(self.config.pad_token_id)
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask=attention_mask)
        widths = [member.config.d_model for member in self.members]
        memories = encoder_outputs[0].split(widths, dim=-1)
        total = None
        for member, memory, cache in zip(self.members, memories, self._caches(past_key_values), strict=True):
            output = member(
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=BaseModelOutput(last_hidden_state=memory),
                past_key_values=cache,
                **kwargs,
            )
            log_probabilities = output.logits.float().log_softmax(dim=-1)
            total = log_probabilities if total is None else torch.logaddexp(total, log_probabilities)
        return Seq2SeqLMOutput(logits=total - log(len(self.members)), past_key_values=past_key_values)

    def _caches(self, cache: EncoderDecoderCache | None) -> list[EncoderDecoderCache | None]:
        """Each member's layers of `cache`."""
        if cache is None:
            return [None] * len(self.members)
        halves = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        shares, start = [], 0
        for member in self.members:
            end = start + member.config.decoder_layers
            shares.append(EncoderDecoderCache(*(Cache(layers=layers[start:end]) for layers in halves)))
            start = end
        return shares


def _shared(member: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    names = ("vocab_size", "encoder_vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    of_config = {name: getattr(member.config, name) for name in names}
    return {**of_config, "dtype": member.dtype, "attn_implementation": member.config._attn_implementation}


class _Encoders(nn.Module):
    """The members' encoders; their outputs lie side by side, (B, S, sum of widths)."""

    main_input_name = "input_ids"

    def __init__(self, encoders: Any):
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        outputs = [encoder(input_ids, attention_mask=attention_mask).last_hidden_state for encoder in self.encoders]
        return BaseModelOutput(last_hidden_state=torch.cat(outputs, dim=-1))


__all__ = ["Ensemble"]
