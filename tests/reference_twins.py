"""Independent models with the tensor names of fairseq and of PyTorch's translation tutorial, and beam search for any.

Written from descriptions of those models, in the plainest way; they share no line with the package.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

Logits = Callable[[Tensor, Tensor], Tensor]


def shake(module: nn.Module, amount: float = 0.2) -> nn.Module:
    """Make every parameter random, norms and biases too, which would hide a mix-up at 1 and 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * amount)
    return module.eval()


# ---- PyTorch's tutorial: a wrapper of torch.nn.Transformer ----


class ScaledEmbedding(nn.Module):
    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)


class AddPositions(nn.Module):
    def __init__(self, length: int, width: int):
        super().__init__()
        angles = torch.outer(torch.arange(length), torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width)))
        table = torch.zeros(length, 1, width)
        table[:, 0, 0::2], table[:, 0, 1::2] = angles.sin(), angles.cos()[:, : width // 2]
        self.register_buffer("pos_embedding", table)

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded + self.pos_embedding[: embedded.shape[1], 0]


class TutorialTransformer(nn.Module):
    """(B, S), (B, T) -> logits (B, T, V).

    Args:
        final_norms: whether the stacks end in layer norms, as those of `torch.nn.Transformer` do.
        shape: arguments of `torch.nn.Transformer`.
    """

    def __init__(self, source_vocabulary: int, vocabulary: int, padding: int = 1, final_norms: bool = True, **shape):
        super().__init__()
        width = shape["d_model"]
        self.padding = padding
        self.transformer = nn.Transformer(batch_first=True, dropout=0.0, **shape)
        if not final_norms:
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.generator = nn.Linear(width, vocabulary)
        self.src_tok_emb = ScaledEmbedding(source_vocabulary, width)
        self.tgt_tok_emb = ScaledEmbedding(vocabulary, width)
        self.positional_encoding = AddPositions(64, width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        # in training mode, because the fast path of inference computes padded rows in another way
        length = target.shape[1]
        hidden = self.transformer.train()(
            self.positional_encoding(self.src_tok_emb(source)),
            self.positional_encoding(self.tgt_tok_emb(target)),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=source.eq(self.padding),
            memory_key_padding_mask=source.eq(self.padding),
        )
        return self.generator(hidden)


# ---- fairseq ----


class FairseqAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, states: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        """`hidden` (B or 1, T or 1, S): True where nothing may be seen."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1))
            for projection, x in ((self.q_proj, states), (self.k_proj, memory), (self.v_proj, memory))
        )
        query = query * query.shape[-1] ** -0.5
        scores = torch.einsum("bthk,bshk->bhts", query, key).masked_fill(hidden[:, None], -math.inf)
        return self.out_proj(torch.einsum("bhts,bshk->bthk", scores.softmax(-1), value).flatten(2))


class FairseqLayer(nn.Module):
    def __init__(self, settings: dict, side: str):
        super().__init__()
        width = settings[f"{side}_embed_dim"]
        self.pre = settings[f"{side}_normalize_before"]
        self.self_attn = FairseqAttention(width, settings[f"{side}_attention_heads"])
        self.self_attn_layer_norm = nn.LayerNorm(width)
        if side == "decoder":
            self.encoder_attn = FairseqAttention(width, settings["decoder_attention_heads"])
            self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, settings[f"{side}_ffn_embed_dim"])
        self.fc2 = nn.Linear(settings[f"{side}_ffn_embed_dim"], width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.activation = {"relu": torch.relu, "gelu": nn.functional.gelu, "swish": nn.functional.silu}[
            settings["activation_fn"]
        ]

    def residual(self, norm: nn.Module, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return states + sublayer(norm(states))
        return norm(states + sublayer(states))

    def forward(self, states: Tensor, hidden: Tensor, memory: Tensor | None = None, padding: Tensor | None = None):
        states = self.residual(self.self_attn_layer_norm, states, lambda x: self.self_attn(x, x, hidden))
        if memory is not None:
            states = self.residual(
                self.encoder_attn_layer_norm, states, lambda x: self.encoder_attn(x, memory, padding)
            )
        return self.residual(self.final_layer_norm, states, lambda x: self.fc2(self.activation(self.fc1(x))))


class FairseqPositions(nn.Module):
    """Sinusoids that the paper has not: all sines, then all cosines, and an exponent that reaches 1."""

    def __init__(self, width: int, padding: int):
        super().__init__()
        self.width, self.padding = width, padding
        self.register_buffer("_float_tensor", torch.zeros(1))

    def forward(self, positions: Tensor) -> Tensor:
        half = self.width // 2
        table = torch.zeros(*positions.shape, self.width)
        for i in range(half):
            angle = positions.float() * torch.tensor(10000.0 ** (-i / (half - 1)))
            table[..., i], table[..., half + i] = angle.sin(), angle.cos()
        return table


class FairseqStack(nn.Module):
    def __init__(self, settings: dict, side: str, vocabulary: int, padding: int):
        super().__init__()
        width = settings[f"{side}_embed_dim"]
        self.register_buffer("version", torch.tensor([3.0]))
        self.padding = padding
        self.scale = 1.0 if settings["no_scale_embedding"] else math.sqrt(width)
        self.embed_tokens = nn.Embedding(vocabulary, width, padding)
        if settings[f"{side}_learned_pos"]:
            self.embed_positions = nn.Embedding(settings["max_source_positions"] + padding + 1, width, padding)
        else:
            self.embed_positions = FairseqPositions(width, padding)
        self.layers = nn.ModuleList(FairseqLayer(settings, side) for _ in range(settings[f"{side}_layers"]))
        self.layer_norm = nn.LayerNorm(width) if settings[f"{side}_normalize_before"] else None

    def embed(self, ids: Tensor) -> Tensor:
        real = ids.ne(self.padding).long()
        positions = real.cumsum(1) * real + self.padding  # the first word is at padding + 1
        return self.embed_tokens(ids) * self.scale + self.embed_positions(positions)


class FairseqTransformer(nn.Module):
    """(B, S), (B, T) -> logits (B, T, V).

    Args:
        settings: the `args` of a checkpoint.
    """

    def __init__(self, settings: dict, source_vocabulary: int, vocabulary: int, padding: int = 1):
        super().__init__()
        self.encoder = FairseqStack(settings, "encoder", source_vocabulary, padding)
        self.decoder = FairseqStack(settings, "decoder", vocabulary, padding)
        self.decoder.output_projection = nn.Linear(settings["decoder_embed_dim"], vocabulary, bias=False)
        if settings["share_all_embeddings"]:
            self.decoder.embed_tokens = self.encoder.embed_tokens
        if settings["share_decoder_input_output_embed"]:
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source.eq(self.encoder.padding)[:, None]
        memory = self.encoder.embed(source)
        for layer in self.encoder.layers:
            memory = layer(memory, padding)
        memory = memory if self.encoder.layer_norm is None else self.encoder.layer_norm(memory)
        future = torch.ones(1, target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        states = self.decoder.embed(target)
        for layer in self.decoder.layers:
            states = layer(states, future, memory, padding)
        states = states if self.decoder.layer_norm is None else self.decoder.layer_norm(states)
        return self.decoder.output_projection(states)


def fairseq_settings(**changes) -> dict:
    """The `args` of a tiny model."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "embed_dim": 32,
            "ffn_embed_dim": 48,
            "attention_heads": 4,
            "layers": 2,
            "normalize_before": False,
            "learned_pos": False,
        }.items()
    }
    return {
        **sides,
        "activation_fn": "relu",
        "no_scale_embedding": False,
        "share_all_embeddings": False,
        "share_decoder_input_output_embed": False,
        "max_source_positions": 64,
        "max_target_positions": 64,
        "dropout": 0.1,
        **changes,
    }


def open_fairseq_checkpoint(content: dict) -> dict:
    """A checkpoint as fairseq has it after opening: what that reads, and the errors of what it misses.

    Old contents are upgraded from keys such as `best_loss` and `optimizer` only if there is no history.
    """
    if "optimizer_history" not in content:
        content["optimizer_history"] = [{"best_loss": content["best_loss"]}]
        content["last_optimizer_state"] = content.pop("optimizer")
    last = content["optimizer_history"][-1]
    for name, default in (("optimizer_name", lambda: ""), ("lr_scheduler_state", lambda: last["best_loss"])):
        last[name] = last[name] if name in last else default()
    assert isinstance(last.get("num_updates", 0), int)
    iterator = content["extra_state"]["train_iterator"]
    assert iterator["epoch"] >= 1
    assert iterator["iterations_in_epoch"] == 0
    arguments = content["args"]
    assert isinstance(arguments, argparse.Namespace)
    assert (arguments.task, arguments.arch) == ("translation", "transformer")
    assert arguments.max_source_positions == arguments.max_target_positions
    return content


# ---- beam search of transformers over any function of source and target ----


class _Source(nn.Module):
    """Stands in for an encoder: what it "encodes" are the ids themselves."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=input_ids[..., None].float())


class _Searchable(PreTrainedModel, GenerationMixin):
    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig, logits: Logits):
        super().__init__(config)
        self.logits, self.source = logits, _Source()
        self.anchor = nn.Parameter(torch.zeros(1))  # transformers asks a model for its device

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.source

    def forward(self, decoder_input_ids: Tensor, encoder_outputs: BaseModelOutput, **_) -> Seq2SeqLMOutput:
        source = encoder_outputs.last_hidden_state[..., 0].long()
        return Seq2SeqLMOutput(logits=self.logits(source, decoder_input_ids))


@torch.no_grad()
def beam_search(logits: Logits, source: Tensor, search: GenerationConfig, vocabulary: int) -> list[list[int]]:
    """What transformers' own beam search finds, one whole forward pass for each word.

    Args:
        logits: (B, S), (B, T) -> (B, T, V).
        source: (B, S), padded.
        search: with all ids.
        vocabulary: V.
    """
    config = PreTrainedConfig(is_encoder_decoder=True, vocab_size=vocabulary)
    model = _Searchable(config, logits).eval()
    return model.generate(source, generation_config=search, use_cache=False).tolist()
