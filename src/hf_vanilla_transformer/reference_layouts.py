"""The layouts of the libraries that people translate with: MarianMTModel, torch.nn.Transformer and fairseq.

| | positions | special tokens | what is fixed there |
|---|---|---|---|
| marian | sines first, then cosines | free | post-norm, epsilon 1e-5 |
| torch | a table beside the weights | unk, pad, bos, eos = 0, 1, 2, 3 | equal heads and d_ff, ReLU or GELU |
| fairseq | from pad + 1, exponents over D / 2 - 1 | bos, pad, eos, unk = 0, 1, 2, 3; starts with eos | epsilon 1e-5 |
"""

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .errors import UserError
from .weight_layout import (
    OUTPUT,
    OUTPUT_BIAS,
    POSITIONS,
    SIDES,
    SOURCE,
    TARGET,
    Layout,
    LayoutOptions,
    State,
    embedding_fields,
    final_norm_fields,
    halved_order,
    interleaved_order,
    inverted,
    join_fused,
    move_padding,
    move_padding_back,
    own_state,
    permute_residual,
    position_fields,
    position_table,
    position_tables,
    refuse,
    rename,
    require_equal_sides,
    require_plain_heads,
    required,
    split_fused,
    stack_fields,
    tensor_names,
    zero_biases,
)


def _fairseq_modules(prefix: str) -> dict[str, str]:
    """Our modules with weight and bias -> those of fairseq, whose names Bart and Marian have kept."""
    modules = {}
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        ours, theirs = f"model.{side}.stack.layers.{{}}.", f"{prefix}{side}.layers.{{}}."
        for attention in attentions:
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                modules[f"{ours}{attention}.{projection}"] = f"{theirs}{attention}.{projection}"
            modules[f"{ours}{attention}_add_norm.norm"] = f"{theirs}{attention}_layer_norm"
        modules[f"{ours}feed_forward.fc1"] = f"{theirs}fc1"
        modules[f"{ours}feed_forward.fc2"] = f"{theirs}fc2"
        modules[f"{ours}feed_forward_add_norm.norm"] = f"{theirs}final_layer_norm"
    return modules


def _fairseq_embeddings(prefix: str) -> dict[str, str]:
    return {name: prefix + name.removeprefix("model.") for name in (SOURCE, TARGET, *POSITIONS.values())}


def _sizes_and_choices(state: State, options: LayoutOptions, norm_position: str) -> dict[str, Any]:
    """All fields but those of positions and heads, for a state in our names."""
    return {
        **embedding_fields(state, options),
        **stack_fields(state),
        **final_norm_fields(state, norm_position),
        **options.config_fields(),
    }


# ---- MarianMTModel of transformers ----

MARIAN = {
    **tensor_names(_fairseq_modules("model.")),
    **_fairseq_embeddings("model."),
    OUTPUT: "lm_head.weight",
    OUTPUT_BIAS: "final_logits_bias",
}
MARIAN_FIELDS = (
    "d_model",
    *(f"{side}_{size}" for side in SIDES for size in ("layers", "attention_heads", "ffn_dim")),
    *("activation_function", "max_position_embeddings", "scale_embedding", "use_cache"),
    *("dropout", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("share_encoder_decoder_embeddings", "tie_word_embeddings"),
)
MARIAN_FIXED = {"norm_position": "post", "position_embedding_type": "sinusoidal", "layer_norm_eps": 1e-5}


def read_marian_settings(settings: Mapping[str, Any]) -> LayoutOptions:
    """The options in the config.json of a MarianMTModel, to which may be added `separate_vocabs` of its tokenizer."""
    config = MarianConfig.from_dict(dict(settings))
    start = config.decoder_start_token_id
    same_names = ("activation_function", "scale_embedding", "max_position_embeddings", "pad_token_id", "eos_token_id")
    return LayoutOptions(
        num_heads=config.encoder_attention_heads,
        decoder_num_heads=config.decoder_attention_heads,
        encoder_vocab_size=config.vocab_size if settings.get("separate_vocabs") else None,
        unk_token_id=settings.get("unk_token_id"),
        bos_token_id=start if config.bos_token_id is None else config.bos_token_id,
        decoder_start_token_id=start,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        activation_dropout=config.activation_dropout,
        **{name: getattr(config, name) for name in same_names},
    )


def read_marian(tensors: State, options: LayoutOptions) -> tuple[dict[str, Any], State]:
    """Tensors of a MarianMTModel. Tied ones may be missing; positions are computed where none are stored."""
    options = options.over(LayoutOptions(scale_embedding=False, unk_token_id=1))
    tensors = dict(tensors)
    shared = tensors.pop("model.shared.weight", None)
    if shared is not None:
        tensors = {f"model.{side}.embed_tokens.weight": shared for side in SIDES} | tensors
    target = required(tensors, "model.decoder.embed_tokens.weight")
    tensors.setdefault("lm_head.weight", target)
    bias = tensors.pop("final_logits_bias", None)
    if bias is not None and bias.any():
        tensors["final_logits_bias"] = bias.flatten()
    state = own_state(tensors, inverted(MARIAN))
    d_model = target.shape[1]
    state = permute_residual(state, interleaved_order(d_model))
    tables = _take_positions(state)
    fields, positions = options.position_limit(), {}
    if tables:
        fields, positions = position_fields(*tables, limit=options.max_position_embeddings)
    fields |= _sizes_and_choices(state, options, options.norm_position or "post")
    return {**fields, **options.head_fields(d_model, 16)}, {**state, **positions}


def write_marian(config: VanillaTransformerConfig, state: State) -> State:
    """Tensors of a MarianMTModel, each tied one once."""
    refuse("marian", config, **MARIAN_FIXED)
    if config.add_final_layer_norm:
        raise UserError("add_final_layer_norm=True cannot be written as marian: its stacks end in no layer norm")
    require_plain_heads("marian", config)
    state = permute_residual(zero_biases(config, state), halved_order(config.d_model))
    bias = state.pop(OUTPUT_BIAS)
    if config.tie_word_embeddings:
        del state[OUTPUT]
    tensors = rename(state, MARIAN) | {"final_logits_bias": bias[None]}
    if config.share_encoder_decoder_embeddings:
        del tensors["model.encoder.embed_tokens.weight"]
        tensors["model.shared.weight"] = tensors.pop("model.decoder.embed_tokens.weight")
    return tensors


def write_marian_settings(config: VanillaTransformerConfig) -> dict[str, Any]:
    """The keyword arguments of `MarianConfig`."""
    return {
        **{name: getattr(config, name) for name in MARIAN_FIELDS},
        "vocab_size": config.encoder_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "unk_token_id": config.unk_token_id,
        "forced_eos_token_id": None,
        "init_std": config.d_model**-0.5,
    }


# ---- torch.nn.Transformer, bare or in the wrapper of PyTorch's translation tutorial ----

IN_PROJ = {f"in_proj_{kind}": [f"{part}_proj.{kind}" for part in "qkv"] for kind in ("weight", "bias")}
TORCH_POSITIONS = "positional_encoding.pos_embedding"
TORCH_ACTIVATIONS = ("relu", "gelu")


def _torch_names() -> dict[str, str]:
    """Our tensors -> those of the tutorial's model, with q, k and v apart."""
    modules = {"lm_head": "generator"}
    for side, attentions in (
        ("encoder", {"self_attn": "self_attn"}),
        ("decoder", {"self_attn": "self_attn", "encoder_attn": "multihead_attn"}),
    ):
        ours, theirs = f"model.{side}.stack.layers.{{}}.", f"transformer.{side}.layers.{{}}."
        for number, (attention, name) in enumerate(attentions.items(), start=1):
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                modules[f"{ours}{attention}.{projection}"] = f"{theirs}{name}.{projection}"
            modules[f"{ours}{attention}_add_norm.norm"] = f"{theirs}norm{number}"
        modules[f"{ours}feed_forward.fc1"] = f"{theirs}linear1"
        modules[f"{ours}feed_forward.fc2"] = f"{theirs}linear2"
        modules[f"{ours}feed_forward_add_norm.norm"] = f"{theirs}norm{len(attentions) + 1}"
        modules[f"model.{side}.stack.final_norm"] = f"transformer.{side}.norm"
    return {
        **tensor_names(modules),
        SOURCE: "src_tok_emb.embedding.weight",
        TARGET: "tgt_tok_emb.embedding.weight",
    }


TORCH = _torch_names()


def read_torch(tensors: State, options: LayoutOptions) -> tuple[dict[str, Any], State]:
    """Tensors of the tutorial's model, or of a bare `torch.nn.Transformer`, which has no embeddings.

    Without embeddings the result has none either: whoever loads it has to make them.
    """
    tensors = dict(tensors)
    table = tensors.pop(TORCH_POSITIONS, None)
    bare = not any(name.startswith("transformer.") for name in tensors)
    names = inverted(TORCH)
    if bare:
        names = {theirs.removeprefix("transformer."): ours for theirs, ours in names.items()}
    for fused, parts in IN_PROJ.items():
        tensors = split_fused(tensors, fused, parts)
    state = own_state(tensors, names, embeddings=not bare)
    norm = required(tensors, ("" if bare else "transformer.") + "decoder.layers.0.norm1.weight")
    fields, positions = options.position_limit(), {}
    if table is not None:
        fields, positions = position_fields(
            position_table(TORCH_POSITIONS, table), limit=options.max_position_embeddings
        )
    fields |= _new_vocabularies(options) if bare else embedding_fields(state, options)
    fields |= {**stack_fields(state), **final_norm_fields(state, options.norm_position or "post")}
    fields |= {"d_model": len(norm), **options.head_fields(len(norm), 8), **options.config_fields()}
    state |= positions
    return (fields, state) if bare else move_padding(fields, state)


def _new_vocabularies(options: LayoutOptions) -> dict[str, Any]:
    if options.vocab_size is None:
        raise UserError(
            "these weights hold no embeddings: pass --vocab_size, and --encoder_vocab_size if there are two"
        )
    return {
        "vocab_size": options.vocab_size,
        "encoder_vocab_size": options.encoder_vocab_size,
        "share_encoder_decoder_embeddings": options.encoder_vocab_size is None,
    }


def write_torch(config: VanillaTransformerConfig, state: State) -> State:
    """Tensors of the tutorial's model; without final layer norms where ours has none."""
    require_plain_heads("torch", config)
    require_equal_sides("torch", config, "attention_heads", "ffn_dim")
    if config.activation_function not in TORCH_ACTIVATIONS:
        raise UserError(
            f"activation_function={config.activation_function!r} cannot be written as torch: "
            f"it has {' and '.join(TORCH_ACTIVATIONS)}"
        )
    state = move_padding_back(config, zero_biases(config, state))
    encoder_table, decoder_table = position_tables(config, state)
    if not torch.equal(encoder_table, decoder_table):
        raise UserError("position_embedding_type='learned' cannot be written as torch: both sides share one table")
    _take_positions(state)
    if not config.scale_embedding:  # the tutorial's embeddings are always scaled
        state |= {name: state[name] / config.d_model**0.5 for name in (SOURCE, TARGET)}
    tensors = rename(state, TORCH)
    for fused, parts in IN_PROJ.items():
        tensors = join_fused(tensors, fused, parts)
    return {**tensors, TORCH_POSITIONS: encoder_table[:, None]}


def torch_advice(config: VanillaTransformerConfig) -> str:
    """How to make the `torch.nn.Transformer` that the tensors fit."""
    call = (
        f"torch.nn.Transformer(d_model={config.d_model}, nhead={config.encoder_attention_heads}, "
        f"num_encoder_layers={config.encoder_layers}, num_decoder_layers={config.decoder_layers}, "
        f"dim_feedforward={config.encoder_ffn_dim}, activation={config.activation_function!r}, "
        f"layer_norm_eps={config.layer_norm_eps}, norm_first={config.norm_position == 'pre'})"
    )
    usual = config.add_final_layer_norm or (config.add_final_layer_norm is None and config.norm_position == "pre")
    return f"the weights are those of {call}" + ("" if usual else " without encoder.norm and decoder.norm")


# ---- fairseq ----

FAIRSEQ = {
    **tensor_names(_fairseq_modules("")),
    **tensor_names({f"model.{side}.stack.final_norm": f"{side}.layer_norm" for side in SIDES}),
    **_fairseq_embeddings(""),
    OUTPUT: "decoder.output_projection.weight",
}
# What checkpoints of before 2019 call their layer norms -> ours; their projections of q, k and v are fused as in torch.
FAIRSEQ_OLD_NORMS = tensor_names(
    {
        f"{side}.layers.{{}}.layer_norms.{number}": f"model.{side}.stack.layers.{{}}.{part}_add_norm.norm"
        for side, parts in (
            ("encoder", ["self_attn", "feed_forward"]),
            ("decoder", ["self_attn", "encoder_attn", "feed_forward"]),
        )
        for number, part in enumerate(parts)
    }
)
FAIRSEQ_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "unk_token_id": 3, "decoder_start_token_id": 2}
# fairseq's --activation-fn -> ours
FAIRSEQ_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_new", "swish": "silu", "tanh": "tanh"}


def read_fairseq_settings(settings: Mapping[str, Any]) -> LayoutOptions:
    """The options in the `args` of a checkpoint, or in the `model` of its `cfg`."""
    for name in ("no_token_positional_embeddings", "no_cross_attention", "cross_self_attention"):
        if settings.get(name):
            raise UserError(f"a fairseq model with {name} cannot be expressed")
    activation = settings.get("activation_fn", "relu")
    if activation not in FAIRSEQ_ACTIVATIONS:
        raise UserError(f"activation_fn={activation!r} of fairseq is not one of {', '.join(FAIRSEQ_ACTIVATIONS)}")
    unscaled, pre_norm = settings.get("no_scale_embedding"), settings.get("encoder_normalize_before")
    lengths = [settings[name] for name in ("max_source_positions", "max_target_positions") if settings.get(name)]
    return LayoutOptions(
        num_heads=settings.get("encoder_attention_heads"),
        decoder_num_heads=settings.get("decoder_attention_heads"),
        norm_position=None if pre_norm is None else ("pre" if pre_norm else "post"),
        activation_function=FAIRSEQ_ACTIVATIONS[activation],
        scale_embedding=None if unscaled is None else not unscaled,
        max_position_embeddings=max(lengths, default=None),
        dropout=settings.get("dropout"),
        attention_dropout=settings.get("attention_dropout"),
        activation_dropout=settings.get("activation_dropout", settings.get("relu_dropout")),
    )


def read_fairseq(tensors: State, options: LayoutOptions) -> tuple[dict[str, Any], State]:
    """The tensors in the `model` of a checkpoint. Sinusoids become learned positions, as many as
    `max_position_embeddings` says (1024)."""
    options = options.over(LayoutOptions(**FAIRSEQ_IDS))
    if any("layernorm_embedding" in name for name in tensors):
        raise UserError("a fairseq model with layernorm_embedding cannot be expressed")
    tensors = {name: tensor for name, tensor in tensors.items() if not _fairseq_buffer(name)}
    target = required(tensors, "decoder.embed_tokens.weight")
    untied = tensors.pop("decoder.embed_out", target)
    tensors.setdefault("decoder.output_projection.weight", untied)
    for fused, parts in IN_PROJ.items():
        tensors = split_fused(tensors, fused, parts)
    state = own_state(tensors, inverted(FAIRSEQ) | FAIRSEQ_OLD_NORMS)
    d_model, first = target.shape[1], options.pad_token_id + 1
    tables = _take_positions(state)
    if tables is None:
        tables = [_fairseq_sinusoids(first, options.max_position_embeddings or 1024, d_model)] * 2
    else:
        tables = [table[first:] for table in tables]
    fields, positions = position_fields(*tables, limit=options.max_position_embeddings)
    found = "pre" if "model.encoder.stack.final_norm.weight" in state else "post"
    fields |= _sizes_and_choices(state, options, options.norm_position or found)
    return {**fields, **options.head_fields(d_model, 8)}, {**state, **positions}


def _fairseq_buffer(name: str) -> bool:
    return name.endswith((".version", ".embed_positions._float_tensor", ".embed_positions.weights"))


def _fairseq_sinusoids(first: int, length: int, d_model: int) -> Tensor:
    """(length, D) from position `first` on, with exponents over D / 2 - 1, sines first; in float32, as there."""
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + length, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos(), angles.new_zeros(length, d_model % 2)], dim=1)


def write_fairseq(config: VanillaTransformerConfig, state: State) -> State:
    """The tensors for the `model` of a checkpoint. Sinusoids are written as learned positions."""
    refuse("fairseq", config, layer_norm_eps=1e-5, lm_head_bias=False)
    pre_norm = config.norm_position == "pre"
    if config.add_final_layer_norm not in (None, pre_norm):
        raise UserError(
            f"add_final_layer_norm={config.add_final_layer_norm} cannot be written as fairseq: "
            "its stacks end in a layer norm if and only if norm_position='pre'"
        )
    require_plain_heads("fairseq", config)
    state = zero_biases(config, state)
    del state[OUTPUT_BIAS]
    for name, table in zip(POSITIONS.values(), position_tables(config, state), strict=True):
        unused = table.new_zeros(config.pad_token_id + 1, config.d_model)
        state[name] = torch.cat([unused, table])
    return rename(state, FAIRSEQ) | {f"{side}.version": torch.tensor([3.0]) for side in SIDES}


def write_fairseq_settings(config: VanillaTransformerConfig) -> dict[str, Any]:
    """A checkpoint without its `model`: what fairseq looks for in every one, as of a training that begins."""
    history = {
        "criterion_name": "LabelSmoothedCrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    return {
        "args": argparse.Namespace(**_fairseq_arguments(config)),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }


def _fairseq_arguments(config: VanillaTransformerConfig) -> dict[str, Any]:
    """The `args` of a checkpoint."""
    activations = inverted(FAIRSEQ_ACTIVATIONS) | {"swish": "swish"}
    if config.activation_function not in activations:
        raise UserError(
            f"activation_function={config.activation_function!r} cannot be written as fairseq: "
            f"it has {', '.join(activations)}"
        )
    sides = {
        f"{side}_{theirs}": getattr(config, ours.format(side))
        for side in SIDES
        for theirs, ours in {
            "embed_dim": "d_model",
            "layers": "{}_layers",
            "attention_heads": "{}_attention_heads",
            "ffn_embed_dim": "{}_ffn_dim",
        }.items()
    }
    dropouts = {name: getattr(config, name) for name in ("dropout", "attention_dropout", "activation_dropout")}
    return {
        "arch": "transformer",
        "task": "translation",
        **sides,
        **dropouts,
        **{f"{side}_normalize_before": config.norm_position == "pre" for side in SIDES},
        **{f"{side}_learned_pos": True for side in SIDES},
        "max_source_positions": config.max_position_embeddings,
        "max_target_positions": config.max_position_embeddings,
        "activation_fn": activations[config.activation_function],
        "no_scale_embedding": not config.scale_embedding,
        "share_all_embeddings": config.share_encoder_decoder_embeddings,
        "share_decoder_input_output_embed": config.tie_word_embeddings,
    }


def fairseq_advice(config: VanillaTransformerConfig) -> str:
    """Whose special tokens the model has."""
    ids = {name: getattr(config, name) for name in FAIRSEQ_IDS}
    if ids == FAIRSEQ_IDS:
        return "special tokens are numbered as in a fairseq dictionary"
    named = ", ".join(f"{name}={value}" for name, value in ids.items())
    return f"special tokens are not numbered as in a fairseq dictionary, but {named}"


def _take_positions(state: State) -> list[Tensor] | None:
    """Take the tables of positions of encoder and decoder out of a state in our names; None if it has none."""
    tables = [state.pop(name, None) for name in POSITIONS.values()]
    if tables[0] is None and tables[1] is None:
        return None
    if tables[0] is None or tables[1] is None:
        raise UserError("only one of encoder and decoder has a table of positions: this model cannot be expressed")
    return tables


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            name="marian",
            description="MarianMTModel of transformers, OPUS-MT included: a folder",
            read=read_marian,
            write=write_marian,
            read_settings=read_marian_settings,
            write_settings=write_marian_settings,
        ),
        Layout(
            name="torch",
            description="torch.nn.Transformer, bare or in the model of PyTorch's translation tutorial: a state dict",
            read=read_torch,
            write=write_torch,
            advice=torch_advice,
        ),
        Layout(
            name="fairseq",
            description="transformer of fairseq: a checkpoint",
            read=read_fairseq,
            write=write_fairseq,
            read_settings=read_fairseq_settings,
            write_settings=write_fairseq_settings,
            advice=fairseq_advice,
        ),
    )
}

__all__ = ["LAYOUTS"]
