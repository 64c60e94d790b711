"""The configuration: the paper's base model (Table 3) as defaults, in the field names of Bart and Marian."""

import difflib

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

PRESETS = {
    "paper-base": {},
    "paper-big": {
        "d_model": 1024,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "dropout": 0.3,
    },
    # Wu et al. 2021, "Good for Misconceived Reasons": the size that fits 29,000 sentence pairs.
    "multi30k-tiny": {
        "d_model": 128,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "dropout": 0.3,
    },
    # Kasai et al. 2021, "Deep Encoder, Shallow Decoder": a translation takes most of its time in the decoder, token by
    # token, and behind a deep encoder one layer of it can do. Twice the encoder layers and one decoder layer have 5%
    # fewer parameters than the layers of paper-base (this is the 12-1 of the article) and of multi30k-tiny, so that
    # each pair can be compared. In the small one the norm stands before each sub-layer, which deep stacks need at high
    # learning rates (Xiong et al. 2020).
    "deep-shallow": {"encoder_layers": 12, "decoder_layers": 1},
    "multi30k-deep-shallow": {
        "d_model": 128,
        "norm_position": "pre",
        "encoder_layers": 8,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "dropout": 0.3,
    },
    "test": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
    },
}

SIZES = (
    "vocab_size",
    "encoder_vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "head_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_position_embeddings",
)


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Everything that decides the shape and the behaviour of a Vanilla Transformer.

    Args:
        vocab_size: tokens of the target vocabulary, or of the joint one.
        encoder_vocab_size: tokens of the source vocabulary; None if source and target share one.
        d_model: width of the residual stream.
        encoder_layers, decoder_layers: N of Figure 1.
        encoder_attention_heads, decoder_attention_heads: h of section 3.2.2.
        head_dim: d_k = d_v; None means d_model / heads.
        encoder_ffn_dim, decoder_ffn_dim: d_ff of section 3.3.
        activation_function: of the feed-forward network, a name that transformers knows.
        attention_bias: whether the projections of attention have biases. The paper writes none; True as in Bart, Marian
            and `torch.nn.Transformer`.
        norm_position: "post" as in the paper, LayerNorm(x + Sublayer(x)), or "pre", x + Sublayer(LayerNorm(x)).
        add_final_layer_norm: whether each stack ends in a layer norm of its own; None means only with pre-norm layers,
            which need it. `torch.nn.Transformer` has it in both cases.
        layer_norm_eps: the epsilon of every layer norm.
        position_embedding_type: "sinusoidal" as in section 3.5, or "learned" (Table 3, row E).
        max_position_embeddings: the longest sequence that the model is meant for, in tokens. Learned positions end
            there; sinusoids go on.
        scale_embedding: whether token embeddings are multiplied by sqrt(d_model), section 3.4.
        share_encoder_decoder_embeddings: source and target embeddings are one matrix (needs a joint vocabulary).
        tie_word_embeddings: target embeddings and output projection are one matrix. Both together are the paper's
            three-way tying; `tie_word_embeddings` alone is two-way; neither is none.
        lm_head_bias: whether the output projection has a bias. The paper's has none; many other implementations' have.
        dropout: P_drop of section 5.4, on sub-layer outputs and embedding sums.
        attention_dropout: on attention weights.
        activation_dropout: inside the feed-forward network.
        label_smoothing: epsilon_ls of section 5.4; applied in training mode only, so that an evaluation loss is the
            plain cross-entropy.
        unk_token_id, pad_token_id, bos_token_id, eos_token_id: the special tokens of both vocabularies. The
            padding id may not be 0: `generate()` takes 0 for "no padding token".
        decoder_start_token_id: the first input of the decoder.
        use_cache: whether keys and values are kept and returned, for `generate()`; not where there are labels.

    Raises:
        StrictDataclassError: (of huggingface_hub) a value of the wrong type or out of range, or values that contradict
            each other.
        ValueError: a misspelt field.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (the Trainer adds to a list)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    }
    base_model_tp_plan = {  # noqa: RUF012
        f"{stack}.stack.layers.*.{name}": style
        for stack, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"]))
        for name, style in [
            *((f"{attention}.{p}_proj", "colwise") for attention in attentions for p in "qkv"),
            *((f"{attention}.out_proj", "rowwise") for attention in attentions),
            ("feed_forward.fc1", "colwise"),
            ("feed_forward.fc2", "rowwise"),
        ]
    }
    # The embeddings and the output projection, which may be one matrix, stay in the group of the whole model.
    base_model_fsdp_plan = {f"{stack}.stack.layers.*": "free_full_weight" for stack in ("encoder", "decoder")}  # noqa: RUF012

    vocab_size: int = 37000
    encoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    head_dim: int | None = None
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    activation_function: str = "relu"
    attention_bias: bool = True
    norm_position: str = "post"
    add_final_layer_norm: bool | None = None
    layer_norm_eps: float = 1e-5
    position_embedding_type: str = "sinusoidal"
    max_position_embeddings: int = 1024
    scale_embedding: bool = True
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    label_smoothing: float | int = 0.1
    unk_token_id: int = 0
    pad_token_id: int = 1
    bos_token_id: int = 2
    eos_token_id: int = 3
    decoder_start_token_id: int = 2
    use_cache: bool = True
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs):
        fields = [*type(self).__dataclass_fields__, *self.attribute_map]
        saved = "model_type" in kwargs  # what others have put into a configuration that was saved is not ours to judge
        for key in () if saved else kwargs.keys() - set(fields):
            if guess := difflib.get_close_matches(key, fields, n=1, cutoff=0.8):
                raise ValueError(f"unknown configuration field {key!r}: did you mean {guess[0]!r}?")
        super().__post_init__(**kwargs)

    @classmethod
    def preset(cls, name: str, **overrides) -> "VanillaTransformerConfig":
        """A named size, with single fields replaced by `overrides`.

        Raises:
            ValueError: no preset of that name.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    # huggingface_hub's `strict` calls each method that begins with `validate_`, when a configuration is made or saved.
    def validate_sizes(self):
        for name in SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} is not positive")
        for side in ("encoder", "decoder"):
            heads = getattr(self, f"{side}_attention_heads")
            if self.head_dim is None and self.d_model % heads:
                raise ValueError(
                    f"d_model={self.d_model} does not divide into {side}_attention_heads={heads}: "
                    "change one of them or set head_dim"
                )
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not in [0, 1)")

    def validate_choices(self):
        choices = {
            "norm_position": ("post", "pre"),
            "position_embedding_type": ("sinusoidal", "learned"),
            "activation_function": tuple(ACT2FN),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")

    def validate_vocabularies(self):
        if self.share_encoder_decoder_embeddings and self.encoder_vocab_size is not None:
            raise ValueError(
                f"encoder_vocab_size={self.encoder_vocab_size} means separate vocabularies: "
                "set share_encoder_decoder_embeddings=False"
            )
        if self.share_encoder_decoder_embeddings and not self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings=False unties every embedding: set share_encoder_decoder_embeddings=False too"
            )
        if self.pad_token_id == 0:
            raise ValueError("pad_token_id=0 is taken for 'no padding token' by generate(): use another id")


__all__ = ["PRESETS", "VanillaTransformerConfig"]
