"""CTranslate2, an inference engine in C++ with int8 on CPUs: a loader for its converter, and translation with it.

Importing this module needs the extra `ctranslate2`; it also teaches CTranslate2's own `TransformersConverter` (the
command `ct2-transformers-converter`) our model type.
"""

import json
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import Converter
from ctranslate2.converters.transformers import ModelLoader, register_loader
from ctranslate2.converters.utils import fuse_linear
from ctranslate2.specs import Activation, TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec
from ctranslate2.specs.common_spec import LinearSpec
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .attention import MultiHeadAttention
from .embeddings import sinusoid_table
from .errors import UserError
from .tokenization_vanilla_transformer import backends, load_tokenizer
from .translation import Hypothesis, beams_for, encode_sources, longest_translation
from .weight_files import require_new_folder
from .workers import SHARES

COMPUTE_TYPES = ("float32", "float16", "bfloat16", "int8", "int8_float32", "int16")
ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELUTanh,
    "gelu_pytorch_tanh": Activation.GELUTanh,
    "quick_gelu": Activation.GELUSigmoid,
    "silu": Activation.SWISH,
    "swish": Activation.SWISH,
    "tanh": Activation.Tanh,
    "sigmoid": Activation.Sigmoid,
}


@register_loader("VanillaTransformerConfig")
class VanillaTransformerLoader(ModelLoader):
    """Our weights in the places of CTranslate2's specification of a Transformer."""

    @property
    def architecture_name(self) -> str:
        """The class of transformers that CTranslate2's own converter loads the model with."""
        return "AutoModelForSeq2SeqLM"

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TransformerSpec:
        """The whole specification: weights, special tokens, vocabularies."""
        spec = self.get_model_spec(model)
        spec.config.unk_token = tokenizer.unk_token
        spec.config.bos_token = tokenizer.bos_token
        spec.config.eos_token = tokenizer.eos_token
        spec.config.decoder_start_token = tokenizer.convert_ids_to_tokens(model.config.decoder_start_token_id)
        spec.config.layer_norm_epsilon = model.config.layer_norm_eps
        spec.config.add_attribute("max_position_embeddings", model.config.max_position_embeddings)
        source, target = _backends(tokenizer)
        spec.register_source_vocabulary(_tokens(source, model.config.encoder_vocab_size or model.config.vocab_size))
        spec.register_target_vocabulary(_tokens(target, model.config.vocab_size))
        return spec

    def get_model_spec(self, model: PreTrainedModel) -> TransformerSpec:
        """
        Raises:
            UserError: the model has something that CTranslate2 lacks.
        """
        _require_expressible(model.config)
        spec = TransformerSpec(
            _stack_spec(TransformerEncoderSpec, "encoder", model.config),
            _stack_spec(TransformerDecoderSpec, "decoder", model.config),
        )
        self._fill_stack(spec.encoder, model.model.encoder)
        self._fill_stack(spec.decoder, model.model.decoder)
        self.set_embeddings(spec.encoder.embeddings[0], model.model.encoder.embed_tokens)
        self.set_embeddings(spec.decoder.embeddings, model.model.decoder.embed_tokens)
        self.set_linear(spec.decoder.projection, model.lm_head)
        return spec

    def _fill_stack(self, spec: TransformerEncoderSpec | TransformerDecoderSpec, half: nn.Module) -> None:
        spec.position_encodings.encodings = _position_table(half)
        for layer_spec, layer in zip(spec.layer, half.stack.layers, strict=True):
            self._fill_attention(layer_spec.self_attention, layer.self_attn, fused=("qkv",))
            self.set_layer_norm(layer_spec.self_attention.layer_norm, layer.self_attn_add_norm.norm)
            if hasattr(layer, "encoder_attn"):
                self._fill_attention(layer_spec.attention, layer.encoder_attn, fused=("q", "kv"))
                self.set_layer_norm(layer_spec.attention.layer_norm, layer.encoder_attn_add_norm.norm)
            self.set_linear(layer_spec.ffn.linear_0, layer.feed_forward.fc1)
            self.set_linear(layer_spec.ffn.linear_1, layer.feed_forward.fc2)
            self.set_layer_norm(layer_spec.ffn.layer_norm, layer.feed_forward_add_norm.norm)
        if isinstance(half.stack.final_norm, nn.LayerNorm):
            self.set_layer_norm(spec.layer_norm, half.stack.final_norm)

    def _fill_attention(
        self, spec: MultiHeadAttentionSpec, attention: MultiHeadAttention, fused: Sequence[str]
    ) -> None:
        """CTranslate2 multiplies by q, k and v at once where they read the same input."""
        for linear_spec, letters in zip(spec.linear, fused, strict=False):
            parts = [LinearSpec() for _ in letters]
            for part, letter in zip(parts, letters, strict=True):
                self.set_linear(part, getattr(attention, f"{letter}_proj"))
            fuse_linear(linear_spec, parts)
        self.set_linear(spec.linear[-1], attention.out_proj)


def _require_expressible(config: PreTrainedConfig) -> None:
    if config.norm_position == "post" and config.add_final_layer_norm:
        raise UserError("CTranslate2 has no final norm after post-norm layers: add_final_layer_norm=True cannot go")
    if config.activation_function not in ACTIVATIONS:
        raise UserError(
            f"CTranslate2 has no activation_function={config.activation_function!r}: it knows {', '.join(ACTIVATIONS)}"
        )


def _stack_spec(kind: type, side: str, config: PreTrainedConfig) -> TransformerEncoderSpec | TransformerDecoderSpec:
    spec = kind(
        getattr(config, f"{side}_layers"),
        getattr(config, f"{side}_attention_heads"),
        pre_norm=config.norm_position == "pre",
        no_final_norm=config.add_final_layer_norm is False,
        activation=ACTIVATIONS[config.activation_function],
        head_dim=config.head_dim,
    )
    spec.scale_embeddings = config.d_model**0.5 if config.scale_embedding else 1.0
    return spec


def _position_table(half: nn.Module):
    config = half.config
    if config.position_embedding_type == "learned":
        return half.embed_positions.weight
    return sinusoid_table(config.max_position_embeddings, config.d_model)


def _backends(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, Tokenizer]:
    """The source's and the target's tokenizer, which a joint vocabulary makes the same.

    Raises:
        UserError: a tokenizer without a vocabulary file of `tokenizers`, such as that of OPUS-MT.
    """
    found = backends(tokenizer)
    if not found:
        raise UserError(
            f"CTranslate2 cannot be given a {type(tokenizer).__name__}: only models with a tokenizer.json can go"
        )
    return tuple(found)


def _tokens(backend: Tokenizer, size: int) -> list[str]:
    """Tokens in the order of their ids; rows of the embedding beyond the vocabulary get names of their own."""
    known = backend.get_vocab_size(with_added_tokens=True)
    return [backend.id_to_token(index) if index < known else f"<unused {index}>" for index in range(size)]


class _LoadedModelConverter(Converter):
    """CTranslate2's converter for a model that is in memory."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self._model = model
        self._tokenizer = tokenizer

    def _load(self) -> TransformerSpec:
        # float32 in, whatever the model's own type: CTranslate2 converts to what is asked for
        return VanillaTransformerLoader()(self._model.float(), self._tokenizer)


def export_ctranslate2(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, compute_type: str = "float32"
) -> Path:
    """Write a CTranslate2 model, with the tokenizer beside it.

    Args:
        model: is left in float32.
        tokenizer: the model's.
        folder: must not exist, or be empty.
        compute_type: how weights are stored, one of `COMPUTE_TYPES`.

    Raises:
        UserError: an unknown type, a folder that is in use, or a model that CTranslate2 cannot express.
    """
    if compute_type not in COMPUTE_TYPES:
        raise UserError(f"unknown compute type {compute_type!r}: choose one of {', '.join(COMPUTE_TYPES)}")
    folder = require_new_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _LoadedModelConverter(model, tokenizer).convert(str(folder), quantization=compute_type, force=True)
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return folder


def _require_average(generation: GenerationConfig, beams: int) -> None:
    """Raises UserError where the model ranks by a formula that CTranslate2 does not know."""
    if beams > 1 and getattr(generation, "length_penalty_type", None) == "wu":
        raise UserError(
            "CTranslate2 does not know the model's length_penalty_type 'wu': "
            "translate with transformers, with one beam, or with the type 'average'"
        )


class CTranslate2Engine:
    """A CTranslate2 model with its tokenizer.

    Args:
        folder: what `export_ctranslate2` wrote.
        device: "cpu", "cuda" or "cuda:1".
        compute_type: "default" is the type of the weights where the device has it, else the nearest one.
        threads: of one batch; 0 lets CTranslate2 choose.
        parallel_batches: batches that are translated at the same time, each by so many threads.
        seed: of samples; with several `parallel_batches` these depend on which thread takes which batch.

    Raises:
        UserError: there is no CTranslate2 model, or no such device.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int = 0,
        parallel_batches: int = 1,
        seed: int = 42,
    ):
        if not (Path(folder) / "model.bin").is_file():
            raise UserError(
                f"{folder} has no model.bin: make it with `vanilla-transformer export --format ctranslate2`"
            )
        kind, _, number = device.partition(":")
        try:
            self.translator = ctranslate2.Translator(
                str(folder),
                device=kind,
                device_index=int(number or 0),
                compute_type=compute_type,
                intra_threads=threads,
                inter_threads=parallel_batches,
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(f"CTranslate2 cannot load {folder} on {device}: {error}") from error
        ctranslate2.set_random_seed(seed)
        self.parallel_batches = parallel_batches
        self.tokenizer = load_tokenizer(folder)
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self._source, self._target = _backends(self.tokenizer)
        settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self._longest = settings["max_position_embeddings"]

    def translate(self, sentences: Sequence[str], **search: Any) -> list[str]:
        """As `translation.translate`; `search` is for `translate_nbest`."""
        return [hypotheses[0].text for hypotheses in self.translate_nbest(sentences, **search)]

    def translate_nbest(
        self,
        sentences: Sequence[str],
        *,
        nbest: int = 1,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        top_k: int | None = None,
        temperature: float | None = None,
        max_tokens_per_batch: int = 16384,
    ) -> list[list[Hypothesis]]:
        """As `translation.translate_nbest`, with the search of CTranslate2; its own generator draws samples."""
        generation = self.generation_config
        beams = beams_for(nbest, num_beams, generation, top_k, temperature, penalised=length_penalty is not None)
        penalty = generation.length_penalty if length_penalty is None else length_penalty
        if beams == 1 or penalty is None:  # without beams the score is the mean, as in `translation`
            penalty = 1.0
        _require_average(generation, beams)
        encoded = encode_sources(self.tokenizer, sentences, self._longest)
        rows = [row for row, ids in enumerate(encoded) if ids]
        longest = longest_translation(generation, max(map(len, encoded), default=0), self._longest)
        at_once = max_tokens_per_batch // max(beams, nbest)
        if self.parallel_batches > 1:  # enough of them for all
            at_once = min(at_once, ceil(sum(map(len, encoded)) / (SHARES * self.parallel_batches)))
        found = self.translator.translate_batch(
            [[self._source.id_to_token(index) for index in encoded[row]] for row in rows],
            max_batch_size=max(1, at_once),
            batch_type="tokens",
            beam_size=beams,
            num_hypotheses=nbest,
            length_penalty=penalty,
            sampling_topk=1 if top_k is None else top_k,
            sampling_temperature=1.0 if temperature is None else temperature,
            # transformers stops with the first `beams` finished hypotheses, or when no better one can come
            patience=1.0 if generation.early_stopping is True or beams == 1 else 2.0,
            min_decoding_length=0,  # a finished empty translation takes a place among the beams, as in transformers
            max_input_length=0,
            max_decoding_length=longest - 1,  # generate() counts the start token, CTranslate2 not
            return_scores=True,
        )
        results = [[Hypothesis("", 0.0)] for _ in sentences]
        for row, result in zip(rows, found, strict=True):
            results[row] = [
                Hypothesis(self._text(tokens), score)
                for tokens, score in zip(result.hypotheses, result.scores, strict=True)
            ]
        return results

    def _text(self, tokens: Sequence[str]) -> str:
        ids = [self._target.token_to_id(token) for token in tokens]
        return self.tokenizer.decode(ids, skip_special_tokens=True)
