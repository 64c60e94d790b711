"""What a foreign weight layout is, and the tools that translate one into ours and back, exactly.

A foreign model differs from ours in the names of its tensors, in fused or transposed matrices, and in quirks of its
arithmetic. Quirks are folded into the weights, so that our model needs no option for them. Two symmetries help:

- The residual stream may be permuted. Whoever puts the sines of the positions in the first half and the cosines in
  the second computes the same function as whoever interleaves them, as in section 3.5 of the paper.
- Any fixed table of positions is a table of learned positions.

A third quirk is padding with token 0, see `move_padding`.

Our names are those of `VanillaTransformerForConditionalGeneration.state_dict()`; "state" is such a dictionary.
Patterns of names have `{}` in the place of a layer's number.

Shapes: D d_model, N positions.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .embeddings import sinusoid_table
from .errors import UserError
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

State = dict[str, Tensor]
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Which axis of a tensor of ours is the residual stream's; biases of q, k, v, fc1 and lm_head do not lie on it.
RESIDUAL_LAST = re.compile(r"(embed_tokens|embed_positions|[qkv]_proj|fc1|lm_head)\.weight$")
RESIDUAL_FIRST = re.compile(r"((out_proj|fc2|norm)\.(weight|bias))$")
SIDES = ("encoder", "decoder")
SOURCE, TARGET = (f"model.{side}.embed_tokens.weight" for side in SIDES)
OUTPUT, OUTPUT_BIAS = "lm_head.weight", "lm_head.bias"
EMBEDDINGS = (SOURCE, TARGET, OUTPUT)
POSITIONS = {side: f"model.{side}.embed_positions.weight" for side in SIDES}
TOKEN_IDS = ("unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
# Options that are fields of the configuration under the same name and that no layout reads from the weights.
PLAIN_OPTIONS = (
    "activation_function",
    "layer_norm_eps",
    "scale_embedding",
    *TOKEN_IDS,
    "dropout",
    "attention_dropout",
    "activation_dropout",
)
# The output bias of rows that only fill up a vocabulary: exp of it is nothing beside any other token. Further training
# may move it a little.
NEVER = -100.0


def _option(text: str) -> Any:
    return field(default=None, metadata={"help": text})


@dataclass(frozen=True)
class LayoutOptions:
    """What weights do not tell. None stands for the default of the reference that the layout belongs to.

    The help of each option is in its metadata, for the command line.
    """

    num_heads: int | None = _option("attention heads, of the encoder or of both sides")
    decoder_num_heads: int | None = _option("attention heads of the decoder if it has others")
    norm_position: str | None = _option("pre or post")
    activation_function: str | None = _option("of the feed-forward network, as transformers calls it")
    layer_norm_eps: float | None = _option("epsilon of the layer norms")
    scale_embedding: bool | None = _option("whether token embeddings are multiplied by sqrt(d_model)")
    vocab_size: int | None = _option("tokens of the target, or of both: only for weights without embeddings")
    encoder_vocab_size: int | None = _option("tokens of the source if it has a vocabulary of its own")
    max_position_embeddings: int | None = _option("longest sequence; learned positions beyond it are left out")
    unk_token_id: int | None = _option("number of the unknown token")
    pad_token_id: int | None = _option("number of the padding token")
    bos_token_id: int | None = _option("number of the token for the begin of a sentence")
    eos_token_id: int | None = _option("number of the token for the end of a sentence")
    decoder_start_token_id: int | None = _option("number of the token that the decoder starts with")
    dropout: float | None = _option("for further training")
    attention_dropout: float | None = _option("for further training")
    activation_dropout: float | None = _option("for further training")

    def over(self, defaults: "LayoutOptions") -> "LayoutOptions":
        """These options, and where they say nothing those of `defaults`."""
        named = {option.name: getattr(self, option.name) for option in fields(self)}
        return LayoutOptions(
            **{name: getattr(defaults, name) if value is None else value for name, value in named.items()}
        )

    def config_fields(self) -> dict[str, Any]:
        """Those of `PLAIN_OPTIONS` that are not None, as keyword arguments of `VanillaTransformerConfig`."""
        return {name: getattr(self, name) for name in PLAIN_OPTIONS if getattr(self, name) is not None}

    def position_limit(self) -> dict[str, int]:
        """`max_position_embeddings` where the weights hold no table of positions, if it is known."""
        return {} if self.max_position_embeddings is None else {"max_position_embeddings": self.max_position_embeddings}

    def head_fields(self, rows: int, default: int) -> dict[str, int]:
        """The numbers of heads, `default` where nothing is said.

        Args:
            rows: of the query projections, d_model in most layouts.

        Raises:
            UserError: they do not divide `rows`.
        """
        encoder = default if self.num_heads is None else self.num_heads
        decoder = encoder if self.decoder_num_heads is None else self.decoder_num_heads
        for heads in (encoder, decoder):
            if heads < 1 or rows % heads:
                raise UserError(
                    f"{rows} rows of the query projections do not divide into {heads} attention heads: pass --num_heads"
                )
        return {"encoder_attention_heads": encoder, "decoder_attention_heads": decoder}


@dataclass(frozen=True)
class Layout:
    """One foreign layout.

    Args:
        name: what --format calls it.
        description: one line for --help.
        read: (foreign tensors, options) -> (keyword arguments of `VanillaTransformerConfig`, the full state in our
            names, tied tensors under each of their names).
        write: (configuration, the full state in our names) -> foreign tensors.
        read_settings: the options that the foreign model's own configuration states; None if it has no such thing.
        write_settings: what stands beside the tensors: our configuration in the words of the foreign one, or all else
            that a checkpoint holds.
        advice: what somebody who loads the written tensors has to know besides, one line; None for nothing.

    All of them raise `UserError` where one side cannot express the other, naming the field or the tensor.
    """

    name: str
    description: str
    read: Callable[[State, LayoutOptions], tuple[dict[str, Any], State]]
    write: Callable[[VanillaTransformerConfig, State], State]
    read_settings: Callable[[Mapping[str, Any]], LayoutOptions] | None = None
    write_settings: Callable[[VanillaTransformerConfig], dict[str, Any]] | None = None
    advice: Callable[[VanillaTransformerConfig], str] | None = None


# ---- names ----


def tensor_names(modules: Mapping[str, str], parameters: Mapping[str, str] | None = None) -> dict[str, str]:
    """Patterns of tensors from patterns of modules: "a": "b" becomes "a.weight": "b.weight" and "a.bias": "b.bias".

    Args:
        modules: pattern of a module -> pattern of the same module on the other side.
        parameters: name of a parameter -> its name on the other side; None means weight and bias on both.
    """
    parameters = parameters or {"weight": "weight", "bias": "bias"}
    return {
        f"{module}.{parameter}": f"{other}.{other_parameter}"
        for module, other in modules.items()
        for parameter, other_parameter in parameters.items()
    }


def inverted(names: Mapping[str, str]) -> dict[str, str]:
    """The same table in the other direction."""
    return {other: name for name, other in names.items()}


def rename(tensors: State, names: Mapping[str, str]) -> State:
    """Tensors under their names on the other side.

    Args:
        tensors: all of them have to be in the table.
        names: pattern -> pattern on the other side, whole tensor names. `{}` stands for the first number in a name;
            a name without `{}` is taken as it is, numbers included.

    Raises:
        UserError: tensors that are not in the table.
    """
    renamed, unknown = {}, []
    for key, tensor in tensors.items():
        layer = LAYER_NUMBER.search(key)
        if key in names:
            renamed[names[key]] = tensor
        elif layer and (pattern := key[: layer.start()] + "{}" + key[layer.end() :]) in names:
            renamed[names[pattern].format(layer.group())] = tensor
        else:
            unknown.append(key)
    if unknown:
        raise UserError(f"tensors that this layout does not know: {shortened(unknown)}: is it another --format?")
    return renamed


def own_state(tensors: State, names: Mapping[str, str], embeddings: bool = True) -> State:
    """`rename`, with vectors and matrices where ours are vectors and matrices.

    Args:
        names: theirs -> ours.
        embeddings: whether there have to be embeddings and an output projection.

    Raises:
        UserError: unknown tensors, others than vectors and matrices, or a missing embedding, in their words.
    """
    state = rename(tensors, names)
    for theirs, ours in names.items():
        if embeddings and ours in EMBEDDINGS and ours not in state:
            required(tensors, theirs)
    for name, tensor in state.items():
        axes = 1 if name.endswith(("bias", "norm.weight")) else 2
        if tensor.dim() != axes:
            raise UserError(f"the tensor for {name} has {tensor.dim()} axes, not {axes}: is it another --format?")
    return state


def shortened(names: Iterable[str], limit: int = 6) -> str:
    """Names for an error message, the first few of them."""
    names = sorted(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def required(tensors: State, name: str) -> Tensor:
    """Raises UserError if there is no tensor of that name."""
    if name not in tensors:
        raise UserError(f"the weights hold no {name}: is it another --format?")
    return tensors[name]


def count_layers(tensors: State, pattern: str) -> int:
    """How many layers there are.

    Args:
        pattern: how the names of a layer's tensors begin, such as "encoder.layers.{}.".

    Raises:
        UserError: none, or a gap in the numbers.
    """
    start, end = (re.escape(part) for part in pattern.split("{}"))
    numbers = {int(match.group(1)) for key in tensors if (match := re.match(f"{start}(\\d+){end}", key))}
    if not numbers:
        raise UserError(f"the weights hold no {pattern.format(0)}*: is it another --format?")
    if gaps := set(range(max(numbers))) - numbers:
        raise UserError(f"the weights hold no {pattern.format(min(gaps))}*, but later layers")
    return len(numbers)


# ---- fused projections ----


def split_fused(tensors: State, ending: str, parts: Iterable[str]) -> State:
    """Cut every tensor whose name ends so into equal pieces along its first axis.

    Args:
        ending: such as "in_proj_weight".
        parts: endings of the pieces in their order, such as "q_proj.weight", "k_proj.weight", "v_proj.weight".

    Raises:
        UserError: a tensor that has no such pieces.
    """
    parts = tuple(parts)
    split = {}
    for key, tensor in tensors.items():
        if key.endswith(ending):
            if tensor.dim() == 0 or len(tensor) % len(parts):
                raise UserError(f"{key} of shape {tuple(tensor.shape)} does not divide into {len(parts)}")
            start = key.removesuffix(ending)
            split |= {start + part: piece.clone() for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True)}
        else:
            split[key] = tensor
    return split


def join_fused(tensors: State, ending: str, parts: Iterable[str]) -> State:
    """The inverse of `split_fused`."""
    first, *others = parts
    pieces = {key for key in tensors if any(key.endswith(other) for other in others)}
    joined = {}
    for key, tensor in tensors.items():
        if key.endswith(first):
            start = key.removesuffix(first)
            joined[start + ending] = torch.cat([tensor, *(tensors[start + other] for other in others)])
        elif key not in pieces:
            joined[key] = tensor
    return joined


# ---- the residual axis ----


def halved_order(d_model: int) -> Tensor:
    """For `permute_residual`: from sines and cosines in turn (ours) to all sines first, then all cosines."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def interleaved_order(d_model: int) -> Tensor:
    """For `permute_residual`: from all sines first, then all cosines, to sines and cosines in turn (ours)."""
    return halved_order(d_model).argsort()


def permute_residual(state: State, order: Tensor) -> State:
    """The same function with its residual stream in another order: new[i] = old[order[i]] along that axis.

    Args:
        state: in our names.
        order: (D), each of 0..D-1 once.
    """
    permuted = {}
    for key, tensor in state.items():
        if RESIDUAL_LAST.search(key):
            permuted[key] = tensor[:, order]
        elif RESIDUAL_FIRST.search(key):
            permuted[key] = tensor[order]
        else:
            permuted[key] = tensor
    return permuted


def is_sinusoid_table(table: Tensor) -> bool:
    """Whether a table (N, D) holds the sinusoids of section 3.5 in our order, computed in float32 or better."""
    error = (table.float() - sinusoid_table(*table.shape)).abs()
    # angles grow with the position, and so does what float32 rounds away
    return bool((error <= 1e-6 + 5e-7 * torch.arange(len(table))[:, None]).all())


def position_table(name: str, tensor: Tensor) -> Tensor:
    """A table (N, D) of positions that somebody has stored as (N, 1, D) or (1, N, D)."""
    if tensor.dim() < 2:
        raise UserError(f"{name} has the shape {tuple(tensor.shape)}: a table of positions has two axes")
    return tensor.flatten(0, -2)


def position_fields(
    encoder_table: Tensor, decoder_table: Tensor | None = None, limit: int | None = None
) -> tuple[dict[str, Any], State]:
    """Configuration and tensors of ours for foreign positions, fixed or learned.

    Sinusoids of section 3.5 are recognised and not stored; anything else becomes learned positions.

    Args:
        encoder_table: (N, D).
        decoder_table: the decoder's; None means that both sides use the first.
        limit: leave out the positions from here on.

    Raises:
        UserError: tables of different lengths, without a `limit` that both reach.
    """
    tables = [encoder_table[:limit], (encoder_table if decoder_table is None else decoder_table)[:limit]]
    length = len(tables[0])
    if len(tables[1]) != length:
        shorter = min(map(len, tables))
        raise UserError(
            f"the encoder has {len(tables[0])} positions and the decoder {len(tables[1])}: "
            f"pass --max_position_embeddings {shorter}"
        )
    if all(map(is_sinusoid_table, tables)):
        return {"position_embedding_type": "sinusoidal", "max_position_embeddings": length}, {}
    tensors = {name: table.clone().float() for name, table in zip(POSITIONS.values(), tables, strict=True)}
    return {"position_embedding_type": "learned", "max_position_embeddings": length}, tensors


def position_tables(config: VanillaTransformerConfig, state: State) -> tuple[Tensor, Tensor]:
    """The positions of encoder and decoder as tables (N, D), whichever kind they are."""
    if config.position_embedding_type == "sinusoidal":
        table = sinusoid_table(config.max_position_embeddings, config.d_model)
        return table, table.clone()
    return state[POSITIONS["encoder"]], state[POSITIONS["decoder"]]


# ---- fields ----


def final_norm_fields(state: State, norm_position: str) -> dict[str, Any]:
    """`norm_position` and `add_final_layer_norm` of a state in our names.

    Raises:
        UserError: only one of the two stacks ends in a layer norm.
    """
    found = [f"model.{side}.stack.final_norm.weight" in state for side in SIDES]
    if found[0] != found[1]:
        raise UserError("only one of encoder and decoder ends in a layer norm: this model cannot be expressed")
    usual = found[0] == (norm_position == "pre")
    return {"norm_position": norm_position, "add_final_layer_norm": None if usual else found[0]}


def embedding_fields(state: State, options: LayoutOptions) -> dict[str, Any]:
    """Sizes of the vocabularies, and which of the three matrices are one, as the values show.

    Args:
        state: in our names, with all three matrices.
        options: a size of the source's vocabulary says that it has one of its own, even if of the target's size.

    Raises:
        UserError: sizes that are not those of the matrices.
    """
    source, target, head = (required(state, name) for name in EMBEDDINGS)
    for name, matrix in (("vocab_size", target), ("encoder_vocab_size", source)):
        if getattr(options, name) not in (None, len(matrix)):
            raise UserError(
                f"{name}={getattr(options, name)}, but the weights have embeddings of {len(matrix)} tokens: "
                f"leave --{name} out"
            )
    separate = options.encoder_vocab_size is not None or len(source) != len(target)
    tied = torch.equal(target, head)
    return {
        "vocab_size": len(target),
        "encoder_vocab_size": len(source) if separate else None,
        "d_model": target.shape[1],
        "share_encoder_decoder_embeddings": not separate and tied and torch.equal(source, target),
        "tie_word_embeddings": tied,
        "lm_head_bias": OUTPUT_BIAS in state,
    }


def stack_fields(state: State) -> dict[str, Any]:
    """Numbers of layers and widths of the feed-forward networks of a state in our names."""
    fields = {}
    for side in SIDES:
        layers = f"model.{side}.stack.layers."
        fields[f"{side}_layers"] = count_layers(state, layers + "{}.")
        fields[f"{side}_ffn_dim"] = len(required(state, f"{layers}0.feed_forward.fc1.weight"))
    return fields


# ---- padding ----


def move_padding(settings: dict[str, Any], state: State) -> tuple[dict[str, Any], State]:
    """The same model with a padding token of its own behind both vocabularies if it pads with token 0.

    `generate()` takes 0 for "no padding token". All tokens keep their numbers, and the new one can never come out.
    Further training leaves it so while `label_smoothing` is 0, as it is set here: smoothing gives each of V tokens a
    share of eps / V, this one too, which would cost 100 eps / V at first and make the token as likely as one never
    seen.

    Args:
        settings: keyword arguments of `VanillaTransformerConfig`.
        state: in our names, with all three matrices.
    """
    if settings.get("pad_token_id") != 0:
        return settings, state
    padding = max(len(state[SOURCE]), len(state[TARGET]))
    bias = state.get(OUTPUT_BIAS, state[OUTPUT].new_zeros(len(state[OUTPUT])))
    grown = {name: _with_rows(state[name], padding + 1, 0.0) for name in EMBEDDINGS}
    grown[OUTPUT_BIAS] = _with_rows(bias, padding + 1, NEVER)
    changes = {"vocab_size": padding + 1, "pad_token_id": padding, "lm_head_bias": True, "label_smoothing": 0.0}
    if settings.get("encoder_vocab_size") is not None:
        changes["encoder_vocab_size"] = padding + 1
    return settings | changes, state | grown


def move_padding_back(config: VanillaTransformerConfig, state: State) -> State:
    """The inverse of `move_padding`, also after further training; a copy of any other state."""
    if not has_moved_padding(config, state):
        return dict(state)
    bias = state[OUTPUT_BIAS]
    rows = source_rows = int((bias > NEVER / 2).nonzero().max()) + 1
    if config.encoder_vocab_size is not None:  # no gradient reaches the rows that were added here: they are still 0
        source_rows = int(state[SOURCE].any(dim=1).nonzero().max()) + 1
    cut = {name: state[name][:rows] for name in (TARGET, OUTPUT, OUTPUT_BIAS)}
    return state | cut | {SOURCE: state[SOURCE][:source_rows]}


def has_moved_padding(config: VanillaTransformerConfig, state: State) -> bool:
    """Whether the padding token is one that `move_padding` has added."""
    padding, bias = config.pad_token_id, state.get(OUTPUT_BIAS)
    return bias is not None and padding == config.vocab_size - 1 and bool(bias[padding] <= NEVER / 2)


def _with_rows(tensor: Tensor, rows: int, value: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((rows - len(tensor), *tensor.shape[1:]), value)])


# ---- checks ----


def zero_biases(config: VanillaTransformerConfig, state: State) -> State:
    """A copy of the state, with biases of zero where attention or the output has none: for layouts that have them."""
    state = {OUTPUT_BIAS: state[OUTPUT].new_zeros(len(state[OUTPUT])), **state}
    if config.attention_bias:
        return state
    biases = {
        f"{key.removesuffix('weight')}bias": tensor.new_zeros(tensor.shape[0])
        for key, tensor in state.items()
        if re.search(r"_attn\.(q|k|v|out)_proj\.weight$", key)
    }
    return state | biases


def refuse(layout: str, config: VanillaTransformerConfig, **expressible: Any) -> None:
    """Raises UserError for the first field that is not the one value that a layout can express."""
    for name, value in expressible.items():
        if getattr(config, name) != value:
            raise UserError(
                f"{name}={getattr(config, name)!r} cannot be written as {layout}, which has {name}={value!r}"
            )


def require_plain_heads(layout: str, config: VanillaTransformerConfig) -> None:
    """Raises UserError unless heads times their size are d_model."""
    for heads in (config.encoder_attention_heads, config.decoder_attention_heads):
        if config.head_dim is not None and heads * config.head_dim != config.d_model:
            raise UserError(
                f"head_dim={config.head_dim} cannot be written as {layout}: "
                f"its {heads} heads divide d_model={config.d_model}"
            )


def require_equal_sides(layout: str, config: VanillaTransformerConfig, *names: str) -> None:
    """Raises UserError where encoder and decoder differ in one of the fields, such as "ffn_dim"."""
    for name in names:
        encoder, decoder = (getattr(config, f"{side}_{name}") for side in SIDES)
        if encoder != decoder:
            raise UserError(
                f"decoder_{name}={decoder} cannot be written as {layout}: it is one number there for both sides, "
                f"and encoder_{name}={encoder}"
            )


def own_config(settings: Mapping[str, Any]) -> VanillaTransformerConfig:
    """Raises UserError where the foreign model cannot be one of ours, or has special tokens that do not exist."""
    try:
        config = VanillaTransformerConfig(**settings)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = re.sub(r"^\w+Error: ", "", str(error).strip().splitlines()[-1].strip())
        raise UserError(f"this model cannot be expressed: {reason}") from error
    padded = min(config.vocab_size, config.encoder_vocab_size or config.vocab_size)
    for name in TOKEN_IDS:
        size = padded if name == "pad_token_id" else config.vocab_size
        if not 0 <= getattr(config, name) < size:
            raise UserError(f"{name}={getattr(config, name)} is not one of {size} tokens: pass --{name}")
    return config


def check_state(config: VanillaTransformerConfig, state: State) -> None:
    """Check a state against the model that it is for.

    Raises:
        UserError: tensors that are missing, left over or of another shape.
    """
    with torch.device("meta"):
        expected = VanillaTransformerForConditionalGeneration(config).state_dict()
    problems = {
        "missing": expected.keys() - state.keys(),
        "left over": state.keys() - expected.keys(),
        "of another shape": {key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape},
    }
    for problem, names in problems.items():
        if names:
            raise UserError(f"the weights do not make a whole model: {problem}: {shortened(names)}")


__all__ = [
    "EMBEDDINGS",
    "OUTPUT",
    "OUTPUT_BIAS",
    "PLAIN_OPTIONS",
    "POSITIONS",
    "SIDES",
    "SOURCE",
    "TARGET",
    "Layout",
    "LayoutOptions",
    "State",
    "check_state",
    "count_layers",
    "embedding_fields",
    "final_norm_fields",
    "halved_order",
    "has_moved_padding",
    "interleaved_order",
    "inverted",
    "is_sinusoid_table",
    "join_fused",
    "move_padding",
    "move_padding_back",
    "own_config",
    "own_state",
    "permute_residual",
    "position_fields",
    "position_table",
    "position_tables",
    "refuse",
    "rename",
    "require_equal_sides",
    "require_plain_heads",
    "required",
    "shortened",
    "split_fused",
    "stack_fields",
    "tensor_names",
    "zero_biases",
]
