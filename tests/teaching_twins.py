"""Small twins of four implementations that people learn from: random weights under their names, and their forward.

Written from a description of each, on plain tensors (`keras`: on numpy arrays), with nothing of our package: what they
compute is what the imported and exported weights are held against. Logits at padded target positions mean nothing.

Shapes: B batch, S source length, T target length, D d_model, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, layer_norm

from hf_vanilla_transformer.weight_layout import LayoutOptions

D_MODEL, D_FF, HEADS, LAYERS = 32, 48, 4, 2
SOURCE_VOCABULARY, TARGET_VOCABULARY = 23, 29
Weights = dict[str, Tensor]


class Draw:
    """Random parameters of moderate size, none of them at its usual first value."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def linear(self, name: str, fan_out: int, fan_in: int, bias: bool = True) -> Weights:
        weights = {f"{name}.weight": self.normal(fan_out, fan_in, std=fan_in**-0.5)}
        return weights | ({f"{name}.bias": self.normal(fan_out, std=0.3)} if bias else {})

    def norm(self, name: str, gain: str, bias: str) -> Weights:
        return {
            f"{name}.{gain}": 1 + self.normal(D_MODEL, std=0.2),
            f"{name}.{bias}": self.normal(D_MODEL, std=0.3),
        }

    def embedding(self, name: str, vocabulary: int, std: float) -> Weights:
        return {name: self.normal(vocabulary, D_MODEL, std=std)}


def sinusoids(length: int) -> Tensor:
    """(length, D), sines and cosines in turn, in float32 as the references compute them."""
    table = torch.zeros(length, D_MODEL)
    angles = torch.arange(length).float()[:, None] / 10000 ** (torch.arange(0, D_MODEL, 2).float() / D_MODEL)
    table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
    return table


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int, allowed: Tensor, fill: float) -> Tensor:
    """Projected (B, T, H * K) and (B, S, H * K) -> (B, T, H * K); `allowed` (B, 1, T or 1, S)."""
    query, key, value = (x.view(len(x), x.shape[1], heads, -1).transpose(1, 2) for x in (query, key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[-1])
    weights = torch.softmax(scores.masked_fill(~allowed, fill), dim=-1)
    mixed = torch.matmul(weights, value).transpose(1, 2)
    return mixed.reshape(len(mixed), mixed.shape[1], -1)


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def causal(length: int) -> Tensor:
    return torch.ones(length, length).tril().bool()


# ---- The Annotated Transformer ----


def annotated_weights(seed: int = 0) -> Weights:
    draw = Draw(seed)
    weights = {}
    for side, vocabulary in (("src", SOURCE_VOCABULARY), ("tgt", TARGET_VOCABULARY)):
        weights |= draw.embedding(f"{side}_embed.0.lut.weight", vocabulary, std=D_MODEL**-0.5)
        weights[f"{side}_embed.1.pe"] = sinusoids(5000)[None]
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "src_attn"])):
        for layer in (f"{side}.layers.{number}" for number in range(LAYERS)):
            for name in attentions:
                for i in range(4):
                    weights |= draw.linear(f"{layer}.{name}.linears.{i}", D_MODEL, D_MODEL)
            weights |= draw.linear(f"{layer}.feed_forward.w_1", D_FF, D_MODEL)
            weights |= draw.linear(f"{layer}.feed_forward.w_2", D_MODEL, D_FF)
            for i in range(len(attentions) + 1):
                weights |= draw.norm(f"{layer}.sublayer.{i}.norm", "a_2", "b_2")
        weights |= draw.norm(f"{side}.norm", "a_2", "b_2")
    return weights | draw.linear("generator.proj", TARGET_VOCABULARY, D_MODEL)


def annotated_logits(weights: Weights, heads: int, padding: int, source: Tensor, target: Tensor) -> Tensor:
    """Ids (B, S) and (B, T) -> logits (B, T, V), before the log-softmax of the generator."""

    def norm(name, x):
        deviation = x.std(-1, keepdim=True)  # divided by D - 1
        return weights[f"{name}.a_2"] * (x - x.mean(-1, keepdim=True)) / (deviation + 1e-6) + weights[f"{name}.b_2"]

    def attend(name, x, memory, mask):
        query, key, value = (linear(weights, f"{name}.linears.{i}", y) for i, y in enumerate((x, memory, memory)))
        return linear(weights, f"{name}.linears.3", attention(query, key, value, heads, mask, -1e9))

    def feed_forward(name, x):
        return linear(weights, f"{name}.w_2", linear(weights, f"{name}.w_1", x).relu())

    def embed(side, ids):
        return (
            weights[f"{side}_embed.0.lut.weight"][ids] * math.sqrt(D_MODEL)
            + (weights[f"{side}_embed.1.pe"][:, : ids.shape[1]])
        )

    source_mask = (source != padding)[:, None, None, :]
    target_mask = (target != padding)[:, None, None, :] & causal(target.shape[1])
    x = embed("src", source)
    for layer in (f"encoder.layers.{number}" for number in range(LAYERS)):
        y = norm(f"{layer}.sublayer.0.norm", x)
        x = x + attend(f"{layer}.self_attn", y, y, source_mask)
        x = x + feed_forward(f"{layer}.feed_forward", norm(f"{layer}.sublayer.1.norm", x))
    memory = norm("encoder.norm", x)
    x = embed("tgt", target)
    for layer in (f"decoder.layers.{number}" for number in range(LAYERS)):
        y = norm(f"{layer}.sublayer.0.norm", x)
        x = x + attend(f"{layer}.self_attn", y, y, target_mask)
        x = x + attend(f"{layer}.src_attn", norm(f"{layer}.sublayer.1.norm", x), memory, source_mask)
        x = x + feed_forward(f"{layer}.feed_forward", norm(f"{layer}.sublayer.2.norm", x))
    return linear(weights, "generator.proj", norm("decoder.norm", x))


# ---- hyunwoongko/transformer ----


def hyunwoongko_weights(seed: int = 0) -> Weights:
    draw = Draw(seed)
    weights = {}
    for side, vocabulary, attentions in (
        ("encoder", SOURCE_VOCABULARY, ["attention"]),
        ("decoder", TARGET_VOCABULARY, ["self_attention", "enc_dec_attention"]),
    ):
        weights |= draw.embedding(f"{side}.emb.tok_emb.weight", vocabulary, std=1.0)
        for layer in (f"{side}.layers.{number}" for number in range(LAYERS)):
            for name in attentions:
                for projection in ("w_q", "w_k", "w_v", "w_concat"):
                    weights |= draw.linear(f"{layer}.{name}.{projection}", D_MODEL, D_MODEL)
            weights |= draw.linear(f"{layer}.ffn.linear1", D_FF, D_MODEL)
            weights |= draw.linear(f"{layer}.ffn.linear2", D_MODEL, D_FF)
            for number in range(1, len(attentions) + 2):
                weights |= draw.norm(f"{layer}.norm{number}", "gamma", "beta")
    return weights | draw.linear("decoder.linear", TARGET_VOCABULARY, D_MODEL)


def hyunwoongko_logits(weights: Weights, heads: int, padding: int, source: Tensor, target: Tensor) -> Tensor:
    """Ids (B, S) and (B, T) -> logits (B, T, V)."""

    def norm(name, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return weights[f"{name}.gamma"] * (x - mean) / torch.sqrt(variance + 1e-12) + weights[f"{name}.beta"]

    def attend(name, x, memory, mask):
        query, key, value = (
            linear(weights, f"{name}.w_{p}", y) for p, y in zip("qkv", (x, memory, memory), strict=True)
        )
        return linear(weights, f"{name}.w_concat", attention(query, key, value, heads, mask, -10000.0))

    def feed_forward(name, x):
        return linear(weights, f"{name}.linear2", torch.relu(linear(weights, f"{name}.linear1", x)))

    def embed(side, ids):
        return weights[f"{side}.emb.tok_emb.weight"][ids] + sinusoids(ids.shape[1])

    source_mask = (source != padding)[:, None, None, :]
    # it hides the rows of padding, not the columns: with padding at the end both give the same real rows
    target_mask = (target != padding)[:, None, :, None] & causal(target.shape[1])
    x = embed("encoder", source)
    for layer in (f"encoder.layers.{number}" for number in range(LAYERS)):
        x = norm(f"{layer}.norm1", x + attend(f"{layer}.attention", x, x, source_mask))
        x = norm(f"{layer}.norm2", x + feed_forward(f"{layer}.ffn", x))
    memory, x = x, embed("decoder", target)
    for layer in (f"decoder.layers.{number}" for number in range(LAYERS)):
        x = norm(f"{layer}.norm1", x + attend(f"{layer}.self_attention", x, x, target_mask))
        x = norm(f"{layer}.norm2", x + attend(f"{layer}.enc_dec_attention", x, memory, source_mask))
        x = norm(f"{layer}.norm3", x + feed_forward(f"{layer}.ffn", x))
    return linear(weights, "decoder.linear", x)


# ---- the tutorial with W_Q, d_k and Conv1d ----

D_K = 12  # HEADS * D_K is not D_MODEL


def conv1d_weights(seed: int = 0, biases: bool = False, norms: bool = True, learned_positions: bool = False) -> Weights:
    """`biases` of attention; `norms` with parameters; positions that are not sinusoids."""
    draw = Draw(seed)
    weights = {}
    for side, embedding, vocabulary, attentions in (
        ("encoder", "src_emb", SOURCE_VOCABULARY, ["enc_self_attn"]),
        ("decoder", "tgt_emb", TARGET_VOCABULARY, ["dec_self_attn", "dec_enc_attn"]),
    ):
        weights |= draw.embedding(f"{side}.{embedding}.weight", vocabulary, std=1.0)
        weights[f"{side}.pos_emb.weight"] = draw.normal(40, D_MODEL, std=0.5) if learned_positions else sinusoids(40)
        for layer in (f"{side}.layers.{number}" for number in range(LAYERS)):
            for name in attentions:
                for projection in ("W_Q", "W_K", "W_V"):
                    weights |= draw.linear(f"{layer}.{name}.{projection}", HEADS * D_K, D_MODEL, biases)
                weights |= draw.linear(f"{layer}.{name}.fc", D_MODEL, HEADS * D_K, biases)
            weights |= draw.linear(f"{layer}.pos_ffn.conv1", D_FF, D_MODEL)
            weights |= draw.linear(f"{layer}.pos_ffn.conv2", D_MODEL, D_FF)
            for name in (*attentions, "pos_ffn") if norms else ():
                weights |= draw.norm(f"{layer}.{name}.layer_norm", "weight", "bias")
    weights |= draw.linear("projection", TARGET_VOCABULARY, D_MODEL, bias=False)
    return {name: x[:, :, None] if ".conv" in name and x.dim() == 2 else x for name, x in weights.items()}


def conv1d_logits(weights: Weights, heads: int, padding: int, source: Tensor, target: Tensor) -> Tensor:
    """Ids (B, S) and (B, T) -> logits (B, T, V)."""

    def norm(name, x):
        return layer_norm(x, (D_MODEL,), weights.get(f"{name}.weight"), weights.get(f"{name}.bias"), 1e-5)

    def attend(name, x, memory, mask):
        query, key, value = (
            linear(weights, f"{name}.W_{p}", y) for p, y in zip("QKV", (x, memory, memory), strict=True)
        )
        mixed = linear(weights, f"{name}.fc", attention(query, key, value, heads, mask, -1e9))
        return norm(f"{name}.layer_norm", mixed + x)

    def feed_forward(name, x):
        y = x.transpose(1, 2)
        for convolution in ("conv1", "conv2"):
            y = conv1d(y, weights[f"{name}.{convolution}.weight"], weights.get(f"{name}.{convolution}.bias"))
            y = y.relu() if convolution == "conv1" else y
        return norm(f"{name}.layer_norm", y.transpose(1, 2) + x)

    source_mask = (source != padding)[:, None, None, :]
    target_mask = (target != padding)[:, None, None, :] & causal(target.shape[1])
    x = weights["encoder.src_emb.weight"][source] + weights["encoder.pos_emb.weight"][: source.shape[1]]
    for layer in (f"encoder.layers.{number}" for number in range(LAYERS)):
        x = feed_forward(f"{layer}.pos_ffn", attend(f"{layer}.enc_self_attn", x, x, source_mask))
    memory = x
    x = weights["decoder.tgt_emb.weight"][target] + weights["decoder.pos_emb.weight"][: target.shape[1]]
    for layer in (f"decoder.layers.{number}" for number in range(LAYERS)):
        x = attend(f"{layer}.dec_self_attn", x, x, target_mask)
        x = feed_forward(f"{layer}.pos_ffn", attend(f"{layer}.dec_enc_attn", x, memory, source_mask))
    return linear(weights, "projection", x)


# ---- the TensorFlow 2 tutorial ----


def keras_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """The variables of the Keras model under the paths of their attributes, in its order."""
    draw = Draw(seed)
    weights = {}
    for side, vocabulary, attentions in (
        ("encoder", SOURCE_VOCABULARY, ["mha"]),
        ("decoder", TARGET_VOCABULARY, ["mha1", "mha2"]),
    ):
        weights[f"{side}/embedding/embeddings"] = draw.normal(vocabulary, D_MODEL, std=D_MODEL**-0.5)
        for layer in (f"{side}/layers/{number}" for number in range(LAYERS)):
            dense = [
                (f"{layer}/{name}/{p}", D_MODEL, D_MODEL) for name in attentions for p in ("wq", "wk", "wv", "dense")
            ]
            dense += [(f"{layer}/ffn/0", D_MODEL, D_FF), (f"{layer}/ffn/1", D_FF, D_MODEL)]
            for name, fan_in, fan_out in dense:
                weights[f"{name}/kernel"] = draw.normal(fan_in, fan_out, std=fan_in**-0.5)
                weights[f"{name}/bias"] = draw.normal(fan_out, std=0.3)
            for number in range(1, len(attentions) + 2):
                weights[f"{layer}/layernorm{number}/gamma"] = 1 + draw.normal(D_MODEL, std=0.2)
                weights[f"{layer}/layernorm{number}/beta"] = draw.normal(D_MODEL, std=0.3)
    weights["final_layer/kernel"] = draw.normal(D_MODEL, TARGET_VOCABULARY, std=D_MODEL**-0.5)
    weights["final_layer/bias"] = draw.normal(TARGET_VOCABULARY, std=0.3)
    return {name: x.numpy() for name, x in weights.items()}


def keras_variables(weights: dict[str, np.ndarray], already: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """The same under the names that Keras gives: layers are numbered as they are made, each kind for itself.

    Args:
        weights: as `keras_weights` makes them.
        already: how many layers of a kind the program has made before.
    """
    count = Counter(already)
    made = {}  # path of a layer -> name that Keras gave it

    def layer_name(path, kind):
        if path not in made:
            made[path] = kind if count[kind] == 0 else f"{kind}_{count[kind]}"
            count[kind] += 1
        return made[path]

    renamed = {}
    for path, array in weights.items():
        *layers, parameter = path.split("/")
        if layers[0] == "final_layer":
            name = layer_name("final_layer", "dense")
        elif layers[1] == "embedding":
            name = f"{layers[0]}/{layer_name('/'.join(layers), 'embedding')}"
        else:
            side, _, number, block, *dense = layers
            kind = {"mha": "multi_head_attention", "ffn": "sequential", "layernorm": "layer_normalization"}
            block_path = f"{side}/{number}/{block}"
            name = f"{side}/{layer_name(f'{side}/{number}', f'{side}_layer')}"
            name += "/" + layer_name(block_path, kind[block.rstrip("123")])
            if dense:
                name += "/" + layer_name(f"{block_path}/{dense[0]}", "dense")
        renamed[f"transformer/{name}/{parameter}:0"] = array
    return renamed


def keras_logits(
    weights: dict[str, np.ndarray], heads: int, padding: int, source: Tensor, target: Tensor, halved: bool = True
) -> Tensor:
    """Ids (B, S) and (B, T) -> logits (B, T, V), in numpy. `halved`: all sines first, then all cosines."""

    def dense(name, x):
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return centred / deviation * weights[f"{name}/gamma"] + weights[f"{name}/beta"]

    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    def attend(name, x, memory, hidden):
        query, key, value = (
            split(dense(f"{name}/{p}", y)) for p, y in zip(("wq", "wk", "wv"), (x, memory, memory), strict=True)
        )
        scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1]) + hidden * -1e9
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value
        return dense(f"{name}/dense", mixed.transpose(0, 2, 1, 3).reshape(x.shape))

    def feed_forward(name, x):
        return dense(f"{name}/1", np.maximum(dense(f"{name}/0", x), 0))

    def embed(side, ids):
        rates = 10000 ** -(2 * (np.arange(D_MODEL) // 2) / D_MODEL)
        angles = np.arange(ids.shape[1])[:, None] * rates
        sines, cosines = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
        table = np.concatenate([sines, cosines], axis=-1)
        if not halved:
            table[:, 0::2], table[:, 1::2] = sines, cosines
        return weights[f"{side}/embedding/embeddings"][ids] * np.sqrt(D_MODEL) + table

    source, target = source.numpy(), target.numpy()
    source_hidden = (source == padding)[:, None, None, :]
    future = np.triu(np.ones((target.shape[1], target.shape[1])), k=1)
    target_hidden = np.maximum((target == padding)[:, None, None, :], future)
    x = embed("encoder", source)
    for layer in (f"encoder/layers/{number}" for number in range(LAYERS)):
        x = norm(f"{layer}/layernorm1", x + attend(f"{layer}/mha", x, x, source_hidden))
        x = norm(f"{layer}/layernorm2", x + feed_forward(f"{layer}/ffn", x))
    memory, x = x, embed("decoder", target)
    for layer in (f"decoder/layers/{number}" for number in range(LAYERS)):
        x = norm(f"{layer}/layernorm1", x + attend(f"{layer}/mha1", x, x, target_hidden))
        x = norm(f"{layer}/layernorm2", x + attend(f"{layer}/mha2", x, memory, source_hidden))
        x = norm(f"{layer}/layernorm3", x + feed_forward(f"{layer}/ffn", x))
    return torch.from_numpy(dense("final_layer", x)).float()


# ---- all of them ----

# What the weights do not tell; the padding of conv1d and keras is 0 by default, which moves (see teaching_layouts).
OPTIONS = {
    "annotated": LayoutOptions(num_heads=HEADS),
    "hyunwoongko": LayoutOptions(num_heads=HEADS),
    "conv1d": LayoutOptions(num_heads=HEADS, pad_token_id=1, bos_token_id=2, eos_token_id=3),
    "keras": LayoutOptions(num_heads=HEADS, pad_token_id=1),
    "keras-interleaved": LayoutOptions(num_heads=HEADS, pad_token_id=1),
}
PADDING = {"annotated": 2, "hyunwoongko": 1, "conv1d": 1, "keras": 1, "keras-interleaved": 1}
WEIGHTS = {
    "annotated": annotated_weights,
    "hyunwoongko": hyunwoongko_weights,
    "conv1d": conv1d_weights,
    "keras": keras_weights,
    "keras-interleaved": keras_weights,
}
LOGITS = {
    "annotated": annotated_logits,
    "hyunwoongko": hyunwoongko_logits,
    "conv1d": conv1d_logits,
    "keras": keras_logits,
    "keras-interleaved": partial(keras_logits, halved=False),
}


def _twin(name: str) -> tuple[dict, LayoutOptions, Callable[[Tensor, Tensor], Tensor]]:
    weights = WEIGHTS[name]()
    named = keras_variables(weights, {"dense": 7, "encoder_layer": 9}) if name.startswith("keras") else weights
    return named, OPTIONS[name], partial(LOGITS[name], weights, HEADS, PADDING[name])


# Name of a layout -> a function without arguments that gives weights (tensors; numpy arrays for keras), options and
# the twin: (source (B, S), target (B, T), padded at the end with PADDING) -> logits (B, T, V).
TWINS: dict[str, Callable[[], tuple[dict, LayoutOptions, Callable[[Tensor, Tensor], Tensor]]]] = {
    name: partial(_twin, name) for name in WEIGHTS
}
