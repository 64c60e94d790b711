"""The Transformer as a Hugging Face model: masks, caches, outputs, generation, loss.

What the network computes stands in `attention`, `embeddings`, `layers` and `transformer`; this file knows nothing of
tokenizers.

Shapes: B batch, T target length, S source length, D d_model, V target vocabulary.
"""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import MultiHeadAttention, scaled_dot_product_attention
from .attention_backends import adapted, bidirectional_mask, causal_mask, check_abilities, check_cache
from .beam_search import beam_search, beam_search_applies, greedy_search
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import Dropout
from .embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding
from .layers import AddAndNorm, DecoderLayer, EncoderLayer, FeedForward
from .length_penalty import length_penalty_of_type
from .loss import IGNORED, cross_entropy_of_logits, label_smoothed_cross_entropy
from .transformer import DecoderStack, EncoderStack


def shift_right(labels: Tensor, pad_token_id: int, decoder_start_token_id: int) -> Tensor:
    """Decoder inputs from labels (B, T): the start token, then every label but the last ("shifted right", Figure 1)."""
    shifted = labels.new_full(labels.shape, decoder_start_token_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


def positions_of(attention_mask: Tensor) -> Tensor:
    """Positions (B, S) that count real tokens only, so that padding on the left shifts nothing."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def _recomputes(module: nn.Module) -> bool:
    """Whether layers are computed again in the backward pass: transformers then keeps the cache from them."""
    return module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """What transformers needs to know to load, move, shard and initialise the model."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    accepts_loss_kwargs = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Every parameter's first value.

        | parameter | value |
        |---|---|
        | linear weight | uniform, Glorot & Bengio 2010, as in the paper's tensor2tensor code |
        | linear bias | 0 |
        | token and position embedding | normal, standard deviation d_model^-0.5 |
        | layer norm | gain 1, bias 0 |
        """
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize a joint vocabulary everywhere; of two vocabularies, the source's.

        Args:
            new_num_tokens: tokens of the new vocabulary; rows are added or removed at the end. None leaves it.
            pad_to_multiple_of: round the number of rows up to a multiple of this.
            mean_resizing: whether new rows are drawn around the mean of the old ones, or as `_init_weights` does.

        Returns:
            the source embedding.
        """
        if self.config.encoder_vocab_size is None:
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        source = self._get_resized_embeddings(
            self.get_input_embeddings(), new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self.config.encoder_vocab_size = source.num_embeddings
        return source

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the target's vocabulary of a model with two: its embedding and the output projection.

        The arguments are those of `resize_token_embeddings`.

        Returns:
            the target embedding.

        Raises:
            ValueError: the vocabulary is joint.
        """
        if self.config.encoder_vocab_size is None:
            raise ValueError(
                "resize_decoder_token_embeddings needs two vocabularies: a joint one is resized everywhere by "
                "resize_token_embeddings"
            )
        target = self._resize_target(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.vocab_size = target.num_embeddings
        self.tie_weights()
        return target

    def _resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True):
        """A joint vocabulary; transformers leaves out a target embedding that is not the source's."""
        source = self._get_resized_embeddings(
            self.get_input_embeddings(), new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self._resize_target(source.num_embeddings, None, mean_resizing)
        return source

    def _resize_target(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None, mean_resizing: bool
    ) -> nn.Embedding:
        target = self._get_resized_embeddings(
            self.base_model.decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        head = self.get_output_embeddings()
        if head is not None:
            weight = self._get_resized_lm_head(head, target.num_embeddings, mean_resizing=mean_resizing).weight
            head.weight.data = weight.data  # in place, to stay frozen or hooked if it was
            head.out_features = target.num_embeddings
            if head.bias is not None:
                head.bias.data = self._resized_bias(head.bias.data, target.num_embeddings)
        return target

    @staticmethod
    def _resized_bias(bias: Tensor, size: int) -> Tensor:
        """New tokens are as likely as the average; transformers leaves out the bias of a tied projection."""
        return torch.cat([bias, bias.mean().expand(max(0, size - len(bias)))])[:size]

    def _attention_function(self, output_attentions: bool | None = None) -> Callable:
        """The backend that `config` asks for, looked up at each forward so that it can be switched at any time.

        Raises:
            UserError: see `attention_backends.check_abilities`.
        """
        name = self.config._attn_implementation
        check_abilities(name, self.config.attention_dropout if self.training else 0.0, output_attentions)
        return adapted(ALL_ATTENTION_FUNCTIONS.get_interface(name, scaled_dot_product_attention), name)

    def _token_embedding(self, vocab_size: int) -> TokenEmbedding:
        scale = self.config.d_model**0.5 if self.config.scale_embedding else 1.0
        return TokenEmbedding(vocab_size, self.config.d_model, scale)

    def _position_embedding(self) -> SinusoidalPositions | LearnedPositions:
        learned = self.config.position_embedding_type == "learned"
        positions = LearnedPositions if learned else SinusoidalPositions
        return positions(self.config.max_position_embeddings, self.config.d_model)

    def _attention(self, num_heads: int, is_causal: bool = False, layer_idx: int = 0) -> MultiHeadAttention:
        config = self.config
        attention = MultiHeadAttention(
            d_model=config.d_model,
            num_heads=num_heads,
            head_dim=config.head_dim or config.d_model // num_heads,
            dropout=config.attention_dropout,
            bias=config.attention_bias,
            is_causal=is_causal,
            layer_idx=layer_idx,
        )
        attention.config = config  # some backends read their settings from the calling layer
        return attention

    def _feed_forward(self, d_ff: int) -> FeedForward:
        config = self.config
        return FeedForward(config.d_model, d_ff, ACT2FN[config.activation_function], config.activation_dropout)

    def _add_and_norm(self) -> AddAndNorm:
        config = self.config
        return AddAndNorm(config.d_model, config.dropout, config.layer_norm_eps, config.norm_position == "pre")

    def _final_norm(self) -> nn.Module:
        wanted = self.config.add_final_layer_norm
        if wanted is None:
            wanted = self.config.norm_position == "pre"
        return nn.LayerNorm(self.config.d_model, eps=self.config.layer_norm_eps) if wanted else nn.Identity()


class VanillaTransformerEncoder(VanillaTransformerPreTrainedModel):
    """Figure 1, left: token embeddings plus positions, dropout, the encoder stack."""

    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": MultiHeadAttention}  # noqa: RUF012

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.embed_tokens = self._token_embedding(config.encoder_vocab_size or config.vocab_size)
        self.embed_positions = self._position_embedding()
        self.dropout = Dropout(config.dropout)
        layers = [
            EncoderLayer(
                self._attention(config.encoder_attention_heads),
                self._feed_forward(config.encoder_ffn_dim),
                self._add_and_norm,
            )
            for _ in range(config.encoder_layers)
        ]
        self.stack = EncoderStack(layers, self._final_norm())
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 = a real token; None means all that is not padding in `input_ids`.
            inputs_embeds: (B, S, D) in the place of `input_ids`, as `embed_tokens` returns them.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
            if attention_mask is None:
                attention_mask = input_ids.ne(self.config.pad_token_id)
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            position_ids = positions_of(attention_mask)
        else:
            position_ids = torch.arange(length, device=inputs_embeds.device)
        positions = self.embed_positions(position_ids, length)
        attend = self._attention_function(kwargs.get("output_attentions", self.config.output_attentions))
        mask = bidirectional_mask(self.config, inputs_embeds, attention_mask)
        hidden_states = self.dropout((inputs_embeds + positions).to(inputs_embeds.dtype))
        return BaseModelOutput(last_hidden_state=self.stack(hidden_states, mask, attend))


class VanillaTransformerDecoder(VanillaTransformerPreTrainedModel):
    """Figure 1, right, up to the final linear layer: embeddings plus positions, dropout, the decoder stack."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DecoderLayer,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        heads = config.decoder_attention_heads
        self.embed_tokens = self._token_embedding(config.vocab_size)
        self.embed_positions = self._position_embedding()
        self.dropout = Dropout(config.dropout)
        layers = [
            DecoderLayer(
                self._attention(heads, is_causal=True, layer_idx=index),
                self._attention(heads, layer_idx=index),
                self._feed_forward(config.decoder_ffn_dim),
                self._add_and_norm,
            )
            for index in range(config.decoder_layers)
        ]
        self.stack = DecoderStack(layers, self._final_norm())
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        Args:
            input_ids: (B, T); with a cache, only the tokens that it does not hold yet.
            attention_mask: (B, past + T), 1 = a real token; None means all. Or a mask of four dimensions as `attention`
                takes it, whose batch may be B / beams like that of the memory.
            encoder_hidden_states: (B, S, D), or (B / beams, S, D) if consecutive rows are beams of one sentence.
            encoder_attention_mask: (B, S) or (B / beams, S), as `encoder_hidden_states`.
            past_key_values: an `EncoderDecoderCache`.
            inputs_embeds: (B, T, D) in the place of `input_ids`, as `embed_tokens` returns them.
            use_cache: whether to make a cache if none is given; none is made where layers are computed twice
                (activation checkpointing in training mode), which leaves the cache out.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; no `encoder_hidden_states`, or a number of
                them that the decoder's rows are no multiple of.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of decoder_input_ids and decoder_inputs_embeds (or labels)")
        if encoder_hidden_states is None:
            raise ValueError("the decoder needs encoder_hidden_states: it attends to the encoder's output")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        rows, sentences = inputs_embeds.shape[0], encoder_hidden_states.shape[0]
        if rows % sentences:
            raise ValueError(f"{rows} rows of the decoder do not divide among {sentences} source sentences")
        if use_cache and past_key_values is None and not _recomputes(self):
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            position_ids = positions_of(attention_mask)[:, -length:]
        else:
            position_ids = torch.arange(length, device=inputs_embeds.device) + past
        # a static cache counts in a tensor, which must not be looked at while the graph is compiled
        total = past + length if isinstance(past, int) else past_key_values.get_max_length()
        positions = self.embed_positions(position_ids, total)
        attend = self._attention_function(kwargs.get("output_attentions", self.config.output_attentions))
        cache = past_key_values.self_attention_cache if past_key_values is not None else None
        mask = causal_mask(self.config, inputs_embeds, attention_mask, cache)
        # the beams of a sentence are so many more queries, see MultiHeadAttention
        queries = inputs_embeds.reshape(sentences, -1, inputs_embeds.shape[-1])
        memory_mask = bidirectional_mask(self.config, queries, encoder_attention_mask, encoder_hidden_states)
        hidden_states = self.stack(
            self.dropout((inputs_embeds + positions).to(inputs_embeds.dtype)),
            encoder_hidden_states,
            mask,
            memory_mask,
            past_key_values,
            attend,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without the output projection: Figure 1 up to "Linear"."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        if config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        for half in (self.encoder, self.decoder):  # the plans of `config` name modules of this model, not of its halves
            half._tp_plan = {"embed_tokens": "embedding_rowwise"}
            half._fsdp_plan = {}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The source embedding, which is also the target's where they are shared."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        """Replace the source embedding, and the target's where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """See `VanillaTransformerEncoder.forward` and `VanillaTransformerDecoder.forward`.

        `encoder_outputs`, if given, takes the place of `input_ids` and `inputs_embeds`.
        """
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids.ne(self.config.pad_token_id)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = BaseModelOutput(
                **dict(zip(("last_hidden_state", "hidden_states", "attentions"), encoder_outputs, strict=False))
            )
        decoder_outputs = self.decoder(
            decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, GenerationMixin):
    """The whole of Figure 1: a model that translates and can be trained.

    `generate()` and `generation_config` know one option more than transformers: `length_penalty_type`, see
    length_penalty.py.
    """

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        source, target = (f"model.{half}.embed_tokens.weight" for half in ("encoder", "decoder"))
        if config.share_encoder_decoder_embeddings:  # to that of `get_input_embeddings`, where peft begins
            self._tied_weights_keys = {"lm_head.weight": source, target: source}
        else:
            self._tied_weights_keys = {"lm_head.weight": target}
        self.generation_config.length_penalty_type = "average"
        self.generation_config._from_model_config = None  # or the line above would be dropped on loading
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """
        Args:
            labels: (B, T), the target ending in EOS, -100 where there is nothing to predict. The decoder's input is
                made from it where none is given.
            num_items_in_batch: what the loss is divided by; None means the number of target tokens in `labels`. The
                Trainer passes the number of the whole optimiser step, which makes the loss independent of gradient
                accumulation and of the number of processes.
            skip_logits: with `labels`, whether the loss may do without the logits as a whole, which saves time and
                memory; None means in training mode.

        Returns:
            loss: label-smoothed in training mode, plain cross-entropy in evaluation mode.
            logits: (B, T, V), or None where they are skipped. They never are if only `lm_head` itself can make them, as
                with an adapter or a hook on it.

        The other arguments are those of `VanillaTransformerModel.forward`.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        loss = logits = None
        if skip_logits is None:
            skip_logits = self.training
        if labels is None or not skip_logits or not self._projects_plainly(outputs.last_hidden_state):
            logits = self.lm_head(outputs.last_hidden_state)
        if labels is not None:
            loss = self._loss(outputs.last_hidden_state, logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss, logits=logits, **{k: v for k, v in outputs.items() if k != "last_hidden_state"}
        )

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any):
        """As in transformers, with a configuration that says what is saved.

        Tied weights are saved once. peft sets `tie_word_embeddings` to False when it merges an adapter into a model
        with a source embedding of its own, tied or not. And the configuration of a published model names files of code:
        that of the model, which transformers saves or not, and that of the pipeline, which may be there already.
        """
        if self.lm_head.weight is self.model.decoder.embed_tokens.weight:
            self.config.tie_word_embeddings = True
        has_code = self._auto_class is not None
        has_pipeline = has_code and Path(save_directory, "pipeline_vanilla_transformer.py").is_file()
        for name, is_there in (("auto_map", has_code), ("custom_pipelines", has_pipeline)):
            if not is_there:
                vars(self.config).pop(name, None)
        super().save_pretrained(save_directory, *args, **kwargs)

    def _projects_plainly(self, hidden_states: Tensor) -> bool:
        """Whether `lm_head` is its weight and bias: no adapter, hook, shard, quantised or offloaded weight."""
        head = self.lm_head
        if type(head) is not nn.Linear or "forward" in vars(head):
            return False
        if type(head.weight) not in (Tensor, nn.Parameter) or type(hidden_states) is not Tensor:
            return False
        if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
            return False
        return head.weight.device == hidden_states.device

    def _is_called_plainly(self) -> bool:
        """Whether a call is `forward` and no more: no subclass, hook, wrapper of a library or compiler in between."""
        return (
            getattr(self.forward, "__func__", None) is VanillaTransformerForConditionalGeneration.forward
            and not (self._forward_hooks or self._forward_pre_hooks)
            and self._compiled_call_impl is None
        )

    def _loss(
        self, hidden_states: Tensor, logits: Tensor | None, labels: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        labels = labels.to(hidden_states.device if logits is None else logits.device)
        total = self._summed_loss(hidden_states, logits, labels)
        if num_items_in_batch is None:
            num_items_in_batch = labels.ne(IGNORED).sum().clamp(min=1)
        elif isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def _summed_loss(self, hidden_states: Tensor, logits: Tensor | None, labels: Tensor) -> Tensor:
        label_smoothing = self.config.label_smoothing if self.training else 0.0
        if logits is None:
            return label_smoothed_cross_entropy(
                hidden_states, self.lm_head.weight, labels, label_smoothing, self.lm_head.bias
            )
        # once made, the logits are what the loss is a function of
        return cross_entropy_of_logits(logits, labels, label_smoothing)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """(B, T) -> (B, T); the name that `DataCollatorForSeq2Seq` looks for."""
        return shift_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    def _prepare_generation_config(self, *args, **kwargs):
        """Give the length penalty the formula that `length_penalty_type` names: in the call, else in the configuration.

        With activation checkpointing in training mode nothing is cached, see `VanillaTransformerDecoder.forward`.

        Raises:
            ValueError: an unknown name.
        """
        name = kwargs.pop("length_penalty_type", None)
        generation_config, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        if name is None:
            name = getattr(generation_config, "length_penalty_type", None)
        generation_config.length_penalty = length_penalty_of_type(generation_config.length_penalty, name)
        if _recomputes(self):
            generation_config.use_cache = False
        return generation_config, model_kwargs

    def create_masks_for_generate(
        self, past_key_values: Cache, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """What `generate()` calls with a static cache. A mask of padding stays as it is: it says the positions, too.

        Raises:
            UserError: see `attention_backends.check_cache`.
        """
        check_cache(self.config, past_key_values)
        if attention_mask is not None:
            return attention_mask
        return create_masks_for_generate(past_key_values=past_key_values, attention_mask=None, **kwargs)

    def _prepare_model_inputs(self, inputs=None, bos_token_id=None, model_kwargs=None):
        """Infer the source's mask where the caller of `generate()` gave none; transformers leaves it out."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        if name == "input_ids" and model_kwargs.get("attention_mask") is None:
            model_kwargs["attention_mask"] = inputs.ne(self.config.pad_token_id).long()
        return inputs, name, model_kwargs

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        """Copy the decoder's side for each beam, but not the source: beams share their sentence's memory."""
        per_sentence = ("encoder_outputs", "attention_mask", "inputs_embeds")
        source = {key: model_kwargs.pop(key) for key in per_sentence if key in model_kwargs}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=False, input_ids=input_ids, **model_kwargs
        )
        return input_ids, {**model_kwargs, **source}

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs):
        """As in transformers; faster where `beam_search` can do what is asked for."""
        asked = (logits_processor, stopping_criteria, generation_config)
        if not args and self._own_search_applies(*asked, model_kwargs, len(input_ids)):
            return beam_search(self, input_ids, generation_config, model_kwargs)
        return super()._beam_search(input_ids, *asked, *args, **model_kwargs)

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs):
        """As in transformers; faster where `greedy_search` can do what is asked for."""
        asked = (logits_processor, stopping_criteria, generation_config)
        silent = model_kwargs.get("streamer") is None
        if not args and silent and self._own_search_applies(*asked, model_kwargs, len(input_ids)):
            return greedy_search(self, input_ids, generation_config, model_kwargs)
        return super()._sample(input_ids, *asked, *args, **model_kwargs)

    def _own_search_applies(self, processors, criteria, generation_config, model_kwargs, rows) -> bool:
        prepare = getattr(self.prepare_inputs_for_generation, "__func__", None)
        return (
            self.config._attn_implementation in ("eager", "sdpa")
            and prepare is GenerationMixin.prepare_inputs_for_generation  # adapters and subclasses may bring their own
            and not model_kwargs.get("synced_gpus", False)
            and beam_search_applies(self.config, generation_config, processors, criteria, model_kwargs, rows)
        )

    @staticmethod
    def _reorder_cache(past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Follow the surviving beams. A beam never leaves its sentence, so the cross-attention cache stays as it is."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values


__all__ = [
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
