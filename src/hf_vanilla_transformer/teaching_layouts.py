"""The weights of four implementations that people learn from, translated exactly into ours and back.

| format | norm | epsilon | embeddings | attention | output bias | unk, pad, bos, eos |
|---|---|---|---|---|---|---|
| `annotated` | pre, final | 1e-6, see `_annotated_norms` | scaled | biases | yes | 3, 2, 0, 1 |
| `hyunwoongko` | post | 1e-12 | not scaled | biases | yes | 0, 1, 2, 3 |
| `conv1d` | post | 1e-5 | not scaled | no biases, d_k = d_v of its own | no | -, 0, and two to be given |
| `keras` | post | 1e-6 | scaled | biases | yes | -, 0, V - 2, V - 1 |

All have 8 heads, ReLU and sinusoids unless the options say otherwise, and as many layers and the same d_ff in encoder
and decoder. Weights do not tell the number of heads: with a wrong one the model loads and talks nonsense.

**Names.** The tables below say all of them.

- `annotated`, `hyunwoongko`: those of the published code. The tables of positions may be there or not.
- `conv1d`: `encoder.src_emb.weight`, `decoder.tgt_emb.weight`, `projection.weight`; per layer `enc_self_attn`,
  `dec_self_attn`, `dec_enc_attn` with `W_Q`, `W_K`, `W_V`, `fc`, `layer_norm`, and `pos_ffn` with `conv1`, `conv2`,
  `layer_norm`. Biases and layer norms may be there or not. So may `encoder.pos_emb.weight` and
  `decoder.pos_emb.weight`, fixed or learned, with the first token's position in the first row. Some copies have other
  words: `CONV1D_OTHER_WORDS`.
- `keras`: the names of variables, `transformer/encoder/encoder_layer_1/multi_head_attention_1/dense_6/kernel:0`, where
  only the order of the numbers counts; or the paths of attributes, `encoder/layers/0/mha/wq/kernel`, in a checkpoint
  `transformer/encoder/enc_layers/0/mha/wq/kernel/.ATTRIBUTES/VARIABLE_VALUE`. `write` uses the short paths, in the
  order of the model's `get_weights()`.

**What is written.** Tied matrices once under each of their names; zeros for biases that we do not have; a scale of the
embeddings that only one of both sides has is multiplied into them. What the code of a reference cannot compute from any
weights is refused.

**Padding** may not be token 0 for us, because `generate()` takes that for "no padding token". Where a reference pads
with 0, all its token ids keep their meaning, and both vocabularies get one more token at their end, the padding, which
can never come out; `write` takes it away again.

**Precision.** The references compute their sinusoids in float32, where the angle at position p is off by about 6e-8 p.
In long sequences that is the largest difference: 6e-6 after 100 tokens, 6e-5 after 1000.

Shapes: D d_model, N positions, V vocabulary.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .embeddings import sinusoid_table
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
    is_sinusoid_table,
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
    stack_fields,
    tensor_names,
    zero_biases,
)

OWN_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


# ---- names ----


def _names(
    encoder: Mapping[str, str],
    decoder: Mapping[str, str],
    projections: tuple[str, str, str, str],
    linear: tuple[str, str] = ("weight", "bias"),
    norm: tuple[str, str] = ("weight", "bias"),
    layers: tuple[str, str] = ("encoder.layers.{}", "decoder.layers.{}"),
) -> dict[str, str]:
    """The names of all tensors inside layers, theirs -> ours.

    Args:
        encoder, decoder: part of a layer of ours -> that part of theirs.
        projections: of queries, keys, values and the output, inside an attention of theirs.
        linear, norm: their words for weight and bias.
        layers: their words for a layer of the encoder and of the decoder.
    """
    names = {}
    for side, parts, prefix in (("encoder", encoder, layers[0]), ("decoder", decoder, layers[1])):
        for part, theirs in parts.items():
            start, own = f"{prefix}.{theirs}", f"model.{side}.stack.layers.{{}}.{part}"
            if part.endswith("_attn"):
                modules = {
                    f"{start}.{name}": f"{own}.{ours}" for name, ours in zip(projections, OWN_PROJECTIONS, strict=True)
                }
                words = linear
            elif part.endswith("_norm"):
                modules, words = {start: f"{own}.norm"}, norm
            else:
                modules, words = {start: own}, linear
            names |= tensor_names(modules, dict(zip(words, ("weight", "bias"), strict=True)))
    return names


ANNOTATED_NAMES = {
    "src_embed.0.lut.weight": SOURCE,
    "tgt_embed.0.lut.weight": TARGET,
    "generator.proj.weight": OUTPUT,
    "generator.proj.bias": OUTPUT_BIAS,
    **tensor_names(
        {f"{side}.norm": f"model.{side}.stack.final_norm" for side in SIDES},
        {"a_2": "weight", "b_2": "bias"},
    ),
    **_names(
        encoder={
            "self_attn": "self_attn",
            "self_attn_add_norm": "sublayer.0.norm",
            "feed_forward.fc1": "feed_forward.w_1",
            "feed_forward.fc2": "feed_forward.w_2",
            "feed_forward_add_norm": "sublayer.1.norm",
        },
        decoder={
            "self_attn": "self_attn",
            "self_attn_add_norm": "sublayer.0.norm",
            "encoder_attn": "src_attn",
            "encoder_attn_add_norm": "sublayer.1.norm",
            "feed_forward.fc1": "feed_forward.w_1",
            "feed_forward.fc2": "feed_forward.w_2",
            "feed_forward_add_norm": "sublayer.2.norm",
        },
        projections=("linears.0", "linears.1", "linears.2", "linears.3"),
        norm=("a_2", "b_2"),
    ),
}
HYUNWOONGKO_NAMES = {
    "encoder.emb.tok_emb.weight": SOURCE,
    "decoder.emb.tok_emb.weight": TARGET,
    "decoder.linear.weight": OUTPUT,
    "decoder.linear.bias": OUTPUT_BIAS,
    **_names(
        encoder={
            "self_attn": "attention",
            "self_attn_add_norm": "norm1",
            "feed_forward.fc1": "ffn.linear1",
            "feed_forward.fc2": "ffn.linear2",
            "feed_forward_add_norm": "norm2",
        },
        decoder={
            "self_attn": "self_attention",
            "self_attn_add_norm": "norm1",
            "encoder_attn": "enc_dec_attention",
            "encoder_attn_add_norm": "norm2",
            "feed_forward.fc1": "ffn.linear1",
            "feed_forward.fc2": "ffn.linear2",
            "feed_forward_add_norm": "norm3",
        },
        projections=("w_q", "w_k", "w_v", "w_concat"),
        norm=("gamma", "beta"),
    ),
}
CONV1D_NAMES = {
    "encoder.src_emb.weight": SOURCE,
    "decoder.tgt_emb.weight": TARGET,
    "projection.weight": OUTPUT,
    "projection.bias": OUTPUT_BIAS,
    "encoder.pos_emb.weight": POSITIONS["encoder"],
    "decoder.pos_emb.weight": POSITIONS["decoder"],
    **_names(
        encoder={
            "self_attn": "enc_self_attn",
            "self_attn_add_norm": "enc_self_attn.layer_norm",
            "feed_forward.fc1": "pos_ffn.conv1",
            "feed_forward.fc2": "pos_ffn.conv2",
            "feed_forward_add_norm": "pos_ffn.layer_norm",
        },
        decoder={
            "self_attn": "dec_self_attn",
            "self_attn_add_norm": "dec_self_attn.layer_norm",
            "encoder_attn": "dec_enc_attn",
            "encoder_attn_add_norm": "dec_enc_attn.layer_norm",
            "feed_forward.fc1": "pos_ffn.conv1",
            "feed_forward.fc2": "pos_ffn.conv2",
            "feed_forward_add_norm": "pos_ffn.layer_norm",
        },
        projections=("W_Q", "W_K", "W_V", "fc"),
    ),
}
# What copies of the tutorial call some modules -> what is written here.
CONV1D_OTHER_WORDS = {
    ".linear.": ".fc.",
    ".pos_ffn.fc.0.": ".pos_ffn.conv1.",
    ".pos_ffn.fc.2.": ".pos_ffn.conv2.",
    ".pos_emb.pe": ".pos_emb.weight",
}
# Attributes of the Keras model, in the order in which it lists its variables.
KERAS_PATHS = {
    "encoder.embedding.embeddings": SOURCE,
    "decoder.embedding.embeddings": TARGET,
    "final_layer.kernel": OUTPUT,
    "final_layer.bias": OUTPUT_BIAS,
    **_names(
        encoder={
            "self_attn": "mha",
            "feed_forward.fc1": "ffn.0",
            "feed_forward.fc2": "ffn.1",
            "self_attn_add_norm": "layernorm1",
            "feed_forward_add_norm": "layernorm2",
        },
        decoder={
            "self_attn": "mha1",
            "encoder_attn": "mha2",
            "feed_forward.fc1": "ffn.0",
            "feed_forward.fc2": "ffn.1",
            "self_attn_add_norm": "layernorm1",
            "encoder_attn_add_norm": "layernorm2",
            "feed_forward_add_norm": "layernorm3",
        },
        projections=("wq", "wk", "wv", "dense"),
        linear=("kernel", "bias"),
        norm=("gamma", "beta"),
    ),
}
# Names of the Keras variables after `_counted`.
KERAS_VARIABLES = {
    "encoder.embedding.0.embeddings": SOURCE,
    "decoder.embedding.0.embeddings": TARGET,
    "dense.0.kernel": OUTPUT,
    "dense.0.bias": OUTPUT_BIAS,
    **_names(
        encoder={
            "self_attn": "multi_head_attention.0",
            "feed_forward.fc1": "sequential.0.dense.0",
            "feed_forward.fc2": "sequential.0.dense.1",
            "self_attn_add_norm": "layer_normalization.0",
            "feed_forward_add_norm": "layer_normalization.1",
        },
        decoder={
            "self_attn": "multi_head_attention.0",
            "encoder_attn": "multi_head_attention.1",
            "feed_forward.fc1": "sequential.0.dense.0",
            "feed_forward.fc2": "sequential.0.dense.1",
            "self_attn_add_norm": "layer_normalization.0",
            "encoder_attn_add_norm": "layer_normalization.1",
            "feed_forward_add_norm": "layer_normalization.2",
        },
        projections=("dense.0", "dense.1", "dense.2", "dense.3"),
        linear=("kernel", "bias"),
        norm=("gamma", "beta"),
        layers=("encoder.encoder_layer.{}", "decoder.decoder_layer.{}"),
    ),
}


# ---- what all four share ----


def _settings(state: State, options: LayoutOptions) -> dict[str, Any]:
    """All fields of the configuration but those of positions, from a state and from options without gaps."""
    settings = {
        **embedding_fields(state, options),
        **stack_fields(state),
        **final_norm_fields(state, options.norm_position),
        "decoder_start_token_id": options.bos_token_id,
        **options.config_fields(),
        "attention_bias": any(name.endswith("_attn.q_proj.bias") for name in state),
    }
    rows = len(required(state, "model.encoder.stack.layers.0.self_attn.q_proj.weight"))
    settings |= options.head_fields(rows, 8)
    if rows != settings["d_model"]:
        settings["head_dim"] = rows // settings["encoder_attention_heads"]
    return settings


def _check_written(layout: str, config: VanillaTransformerConfig, defaults: LayoutOptions) -> None:
    """Raises UserError where the code of a reference computes something else than our model."""
    refuse(layout, config, norm_position=defaults.norm_position, activation_function=defaults.activation_function)
    require_equal_sides(layout, config, "layers", "attention_heads", "ffn_dim")
    if config.layer_norm_eps != defaults.layer_norm_eps:
        raise UserError(
            f"layer_norm_eps={config.layer_norm_eps} cannot be written as {layout}, whose code has "
            f"{defaults.layer_norm_eps}: set that in config.json if such a difference does not matter to you"
        )
    final_norm = config.norm_position == "pre"
    if config.add_final_layer_norm not in (None, final_norm):
        raise UserError(
            f"add_final_layer_norm={config.add_final_layer_norm} cannot be written as {layout}: "
            f"its code has add_final_layer_norm={final_norm}"
        )


def _check_plain(layout: str, config: VanillaTransformerConfig) -> None:
    """Raises UserError for what only `conv1d` can express."""
    refuse(layout, config, position_embedding_type="sinusoidal")
    require_plain_heads(layout, config)


def _foreign_vocabulary(config: VanillaTransformerConfig, state: State, scaled: bool) -> State:
    """The state with the token embeddings and the vocabulary that a reference expects.

    Args:
        scaled: whether the reference multiplies its embeddings by sqrt(d_model).
    """
    state = move_padding_back(config, state)
    factor = config.d_model ** ((config.scale_embedding - scaled) / 2)
    return state | {name: state[name] * factor for name in (SOURCE, TARGET)}


def _without_sinusoids(weights: State, names: tuple[str, ...], limit: int | None) -> tuple[State, dict[str, Any]]:
    """The weights without the named tables (..., N, D), if they hold them, and the length for the configuration.

    Args:
        limit: the longest sequence that the model is meant for; None leaves that to the tables.

    Raises:
        UserError: a table does not hold the sinusoids of section 3.5 in our order.
    """
    tables = {name: position_table(name, weights[name]) for name in names if name in weights}
    for name, table in tables.items():
        if not is_sinusoid_table(table):
            raise UserError(f"{name} does not hold the sinusoids of the paper: this layout has no other positions")
    rest = {name: tensor for name, tensor in weights.items() if name not in tables}
    lengths = [len(table) for table in tables.values()] + ([] if limit is None else [limit])
    return rest, {"max_position_embeddings": min(lengths)} if lengths else {}


# ---- annotated ----

ANNOTATED_DEFAULTS = LayoutOptions(
    norm_position="pre",
    activation_function="relu",
    layer_norm_eps=1e-6,
    scale_embedding=True,
    unk_token_id=3,
    pad_token_id=2,
    bos_token_id=0,
    eos_token_id=1,
)
ANNOTATED_TABLES = ("src_embed.1.pe", "tgt_embed.1.pe")
ANNOTATED_POSITIONS = 5000  # what its code makes, whatever the model is for


def _annotated_norms(state: State, to_ours: bool) -> State:
    """Gains for another kind of layer norm.

    The reference computes a (x - mean) / (s + e) + b, where s is the standard deviation with D - 1 in the denominator
    and e = 1e-6; we compute g (x - mean) / sqrt(v + e') + b, where v = s^2 (D - 1) / D. With g = a sqrt((D - 1) / D)
    and e' = e both fractions are equal at s = 1/2 (to first order in e), and at s > 1/2 they differ by less than 5e-7
    of their value. Sinusoids alone have an s of about 1/2.
    """
    d_model = state[TARGET].shape[1]
    factor = ((d_model - 1) / d_model) ** (0.5 if to_ours else -0.5)
    return {name: tensor * factor if name.endswith("norm.weight") else tensor for name, tensor in state.items()}


def _read_annotated(weights: State, options: LayoutOptions) -> tuple[dict[str, Any], State]:
    weights, lengths = _without_sinusoids(weights, ANNOTATED_TABLES, options.max_position_embeddings)
    state = own_state(weights, ANNOTATED_NAMES)
    settings = _settings(state, options.over(ANNOTATED_DEFAULTS)) | lengths
    return move_padding(settings, _annotated_norms(state, to_ours=True))


def _write_annotated(config: VanillaTransformerConfig, state: State) -> State:
    _check_written("annotated", config, ANNOTATED_DEFAULTS)
    _check_plain("annotated", config)
    state = zero_biases(config, _annotated_norms(_foreign_vocabulary(config, state, scaled=True), to_ours=False))
    length = max(ANNOTATED_POSITIONS, config.max_position_embeddings)
    table = sinusoid_table(length, config.d_model)[None]
    return rename(state, inverted(ANNOTATED_NAMES)) | dict.fromkeys(ANNOTATED_TABLES, table)


# ---- hyunwoongko ----

HYUNWOONGKO_DEFAULTS = LayoutOptions(
    norm_position="post",
    activation_function="relu",
    layer_norm_eps=1e-12,
    scale_embedding=False,
    unk_token_id=0,
    pad_token_id=1,
    bos_token_id=2,
    eos_token_id=3,
)
# An attribute of the published code, a buffer in copies that move it between devices.
HYUNWOONGKO_TABLES = ("encoder.emb.pos_emb.encoding", "decoder.emb.pos_emb.encoding")


def _read_hyunwoongko(weights: State, options: LayoutOptions) -> tuple[dict[str, Any], State]:
    weights, lengths = _without_sinusoids(weights, HYUNWOONGKO_TABLES, options.max_position_embeddings)
    state = own_state(weights, HYUNWOONGKO_NAMES)
    return move_padding(_settings(state, options.over(HYUNWOONGKO_DEFAULTS)) | lengths, state)


def _write_hyunwoongko(config: VanillaTransformerConfig, state: State) -> State:
    _check_written("hyunwoongko", config, HYUNWOONGKO_DEFAULTS)
    _check_plain("hyunwoongko", config)
    state = zero_biases(config, _foreign_vocabulary(config, state, scaled=False))
    return rename(state, inverted(HYUNWOONGKO_NAMES))


# ---- conv1d ----

CONV1D_DEFAULTS = LayoutOptions(
    norm_position="post",
    activation_function="relu",
    layer_norm_eps=1e-5,
    scale_embedding=False,
    pad_token_id=0,
)


def _conv1d_word(name: str) -> str:
    """The name that `CONV1D_NAMES` has for a tensor of any copy of the tutorial."""
    for other, word in CONV1D_OTHER_WORDS.items():
        name = name.replace(other, word)
    return name


def _conv1d_shape(name: str, tensor: Tensor) -> Tensor:
    """Without the axis of a convolution's width, 1, or of the batch in a table of positions."""
    if ".pos_emb." in name:
        return position_table(name, tensor)
    return tensor.squeeze(-1) if tensor.dim() == 3 else tensor


def _completed(state: State) -> State:
    """The state with the values of what a copy of the tutorial leaves out: biases of 0, norms of gain 1 and bias 0."""
    biased = any(re.search(r"_attn\..*\.bias$", name) for name in state)
    completed = dict(state)
    for name, tensor in state.items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and (".fc" in module or (biased and module.endswith("_proj"))):
            completed.setdefault(f"{module}.bias", tensor.new_zeros(len(tensor)))
        if parameter == "weight" and module.endswith(("out_proj", "fc2")):
            norm = module.rpartition(".")[0] + "_add_norm.norm"
            completed.setdefault(f"{norm}.weight", tensor.new_ones(len(tensor)))
            completed.setdefault(f"{norm}.bias", tensor.new_zeros(len(tensor)))
    return completed


def _read_conv1d(weights: State, options: LayoutOptions) -> tuple[dict[str, Any], State]:
    options = options.over(CONV1D_DEFAULTS)
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(options, name) is None:
            raise UserError(f"conv1d: pass --{name}: every copy of this tutorial has special tokens of its own")
    state = own_state({_conv1d_word(name): _conv1d_shape(name, x) for name, x in weights.items()}, CONV1D_NAMES)
    tables = [state.pop(name) for name in POSITIONS.values() if name in state]
    if len(tables) == 1:
        raise UserError("only one of encoder.pos_emb and decoder.pos_emb is there: give both or none")
    for name, value in state.items():
        query = state.get(name.replace("v_proj", "q_proj"), value)
        if len(query) != len(value):
            raise UserError(f"W_Q has {len(query)} rows and W_V {len(value)}: our heads have d_k = d_v")
    state = _completed(state)
    positions, learned = options.position_limit(), {}
    if tables:
        positions, learned = position_fields(*tables, limit=options.max_position_embeddings)
    return move_padding(_settings(state, options) | positions, state | learned)


def _write_conv1d(config: VanillaTransformerConfig, state: State) -> State:
    _check_written("conv1d", config, CONV1D_DEFAULTS)
    state = _foreign_vocabulary(config, state, scaled=False)
    state |= dict(zip(POSITIONS.values(), position_tables(config, state), strict=True))
    if OUTPUT_BIAS in state and not state[OUTPUT_BIAS].any():
        del state[OUTPUT_BIAS]
    convolutions = {name: state[name][:, :, None] for name in state if re.search(r"\.fc[12]\.weight$", name)}
    return rename(state | convolutions, inverted(CONV1D_NAMES))


# ---- keras ----

KERAS_DEFAULTS = LayoutOptions(
    norm_position="post",
    activation_function="relu",
    layer_norm_eps=1e-6,
    scale_embedding=True,
    pad_token_id=0,
)
# Layers that Keras numbers as they are made: "dense", "dense_1", ... in one sequence for the whole program.
KERAS_NUMBERED = re.compile(
    r"(embedding|encoder_layer|decoder_layer|multi_head_attention|sequential|dense|layer_normalization)(?:_(\d+))?"
)


def _keras_names(weights: Mapping[str, Any]) -> dict[str, str]:
    """Name in a file -> name in `KERAS_PATHS` or, where Keras named the variables, in `KERAS_VARIABLES`.

    Raises:
        UserError: two names that stand for the same variable.
    """
    paths = {}
    for name in weights:
        path = re.sub(r":0$|/\.ATTRIBUTES/VARIABLE_VALUE$", "", name)
        path = re.sub(r"^(transformer|model)(_\d+)?/", "", path)
        paths[name] = re.sub(r"^(encoder|decoder)_\d+/", r"\1/", path).split("/")
    if any(part.startswith("encoder_layer") for path in paths.values() for part in path):
        names = _counted(paths)
    else:
        names = {name: re.sub(r"\b(enc|dec)_layers\b", "layers", ".".join(path)) for name, path in paths.items()}
        names = {name: path.replace("layer_with_weights-", "") for name, path in names.items()}
    seen = {}
    for name, path in names.items():
        if path in seen:
            raise UserError(f"{seen[path]} and {name} are the same variable: give the variables of one model")
        seen[path] = name
    return names


def _counted(paths: Mapping[str, list[str]]) -> dict[str, str]:
    """Numbers that tell which of its siblings a layer is, in place of Keras's running numbers.

    In the first decoder layer "multi_head_attention_4/dense_18" becomes "multi_head_attention.0.dense.2" where 4 is
    the lower of two numbers and 18 the third of four.
    """
    siblings: dict[tuple[str, ...], set[int]] = {}
    for path in paths.values():
        for depth, part in enumerate(path):
            if match := KERAS_NUMBERED.fullmatch(part):
                siblings.setdefault((*path[:depth], match[1]), set()).add(int(match[2] or 0))
    names = {}
    for name, path in paths.items():
        words = []
        for depth, part in enumerate(path):
            if match := KERAS_NUMBERED.fullmatch(part):
                rank = sorted(siblings[(*path[:depth], match[1])]).index(int(match[2] or 0))
                part = f"{match[1]}.{rank}"
            words.append(part)
        names[name] = ".".join(words)
    return names


def _transposed(state: State) -> State:
    """Dense layers keep their matrices as (in, out), `nn.Linear` as (out, in)."""
    return {name: tensor.T if tensor.dim() == 2 and "embed" not in name else tensor for name, tensor in state.items()}


def _read_keras(weights: State, options: LayoutOptions, halved: bool) -> tuple[dict[str, Any], State]:
    """See `LAYOUTS`. `halved`: the positions are all sines, then all cosines."""
    names = _keras_names(weights)
    tensors = {names[name]: torch.as_tensor(tensor) for name, tensor in weights.items()}
    state = _transposed(own_state(tensors, KERAS_PATHS | KERAS_VARIABLES))
    vocab_size, d_model = state[TARGET].shape
    if halved:
        state = permute_residual(state, interleaved_order(d_model))
    own_ids = LayoutOptions(bos_token_id=vocab_size - 2, eos_token_id=vocab_size - 1)
    settings = _settings(state, options.over(KERAS_DEFAULTS).over(own_ids)) | options.position_limit()
    return move_padding(settings, state)


def _write_keras(config: VanillaTransformerConfig, state: State, halved: bool) -> State:
    name = "keras" if halved else "keras-interleaved"
    _check_written(name, config, KERAS_DEFAULTS)
    _check_plain(name, config)
    state = zero_biases(config, _foreign_vocabulary(config, state, scaled=True))
    if halved:
        state = permute_residual(state, halved_order(config.d_model))
    tensors = rename(_transposed(state), inverted(KERAS_PATHS))
    return {name.replace(".", "/"): tensors[name] for name in _keras_order(config)}


def _keras_order(config: VanillaTransformerConfig) -> list[str]:
    """The names in `KERAS_PATHS` in the order of the Keras model's variables."""
    ordered = []
    for side in SIDES:
        ordered.append(f"{side}.embedding.embeddings")
        patterns = [name for name in KERAS_PATHS if name.startswith(f"{side}.layers.")]
        for layer in range(getattr(config, f"{side}_layers")):
            ordered += [pattern.format(layer) for pattern in patterns]
    return [*ordered, "final_layer.kernel", "final_layer.bias"]


def _advice(config: VanillaTransformerConfig) -> str:
    """What the weights do not tell, for whoever builds the model that they fit."""
    heads, padding = config.encoder_attention_heads, config.pad_token_id
    may_have_moved = config.lm_head_bias and padding == config.vocab_size - 1
    return (
        f"build the model with {heads} heads of size {config.head_dim or config.d_model // heads}; "
        f"decoding starts with token {config.decoder_start_token_id} and ends with {config.eos_token_id}; "
        f"the masks have to hide token {padding}" + (", or 0 if that was imported as padding" if may_have_moved else "")
    )


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "annotated",
            "The Annotated Transformer (pre-norm, a_2 and b_2): a state dict",
            _read_annotated,
            _write_annotated,
            advice=_advice,
        ),
        Layout(
            "hyunwoongko",
            "hyunwoongko/transformer (w_q, gamma and beta): a state dict",
            _read_hyunwoongko,
            _write_hyunwoongko,
            advice=_advice,
        ),
        Layout(
            "conv1d",
            "the tutorial with W_Q, d_k and a Conv1d feed-forward: a state dict",
            _read_conv1d,
            _write_conv1d,
            advice=_advice,
        ),
        Layout(
            "keras",
            "the TensorFlow 2 tutorial, positions first all sines, then all cosines: a dictionary of arrays",
            partial(_read_keras, halved=True),
            partial(_write_keras, halved=True),
            advice=_advice,
        ),
        Layout(
            "keras-interleaved",
            "as keras, with sines and cosines in turn, as in later versions of that tutorial",
            partial(_read_keras, halved=False),
            partial(_write_keras, halved=False),
            advice=_advice,
        ),
    )
}


__all__ = ["LAYOUTS"]
