"""The configuration: defaults, presets, checks, round trip, and that every field is read by something."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import hf_vanilla_transformer
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.arguments import read_recipe
from hf_vanilla_transformer.configuration_vanilla_transformer import PRESETS

OWN_FIELDS = [name for name in VanillaTransformerConfig.__annotations__ if name not in ("model_type", "attribute_map")]
SIZES = [
    name
    for name, kind in VanillaTransformerConfig.__annotations__.items()
    if kind in (int, int | None) and not name.endswith("_token_id")
]


def parameters(name, vocab_size, **overrides):
    """Without memory: a configuration's parameters are counted on the meta device."""
    config = VanillaTransformerConfig.preset(name, vocab_size=vocab_size, **overrides)
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(config).num_parameters()


class TestSizes:
    @pytest.mark.parametrize(
        ("name", "vocab_size", "expected", "tolerance"),
        [
            # Table 3 of the paper (65 and 213 million), with its 37,000 tokens
            ("paper-base", 37000, 65e6, 0.04),
            ("paper-big", 37000, 213e6, 0.04),
            # Wu et al. 2021
            ("multi30k-tiny", 9500, 2.5e6, 0.04),
        ],
    )
    def test_published_parameter_counts(self, name, vocab_size, expected, tolerance):
        assert parameters(name, vocab_size) == pytest.approx(expected, rel=tolerance)

    @pytest.mark.parametrize("name", PRESETS)
    @pytest.mark.parametrize("norm_position", ["post", "pre"])
    def test_parameter_formula(self, name, norm_position):
        config = VanillaTransformerConfig.preset(name)
        d, d_ff, vocab_size = config.d_model, config.encoder_ffn_dim, 1000
        attention = 4 * (d * d + d)
        feed_forward = d * d_ff + d_ff + d_ff * d + d
        norm = 2 * d
        encoder = config.encoder_layers * (attention + feed_forward + 2 * norm)
        decoder = config.decoder_layers * (2 * attention + feed_forward + 3 * norm)
        final_norms = 2 * norm if norm_position == "pre" else 0
        expected = vocab_size * d + encoder + decoder + final_norms
        assert parameters(name, vocab_size, norm_position=norm_position) == expected

    def test_paper_defaults(self):
        """Table 3, row "base", and sections 3.4, 5.3, 5.4."""
        config = VanillaTransformerConfig()
        assert (config.d_model, config.encoder_ffn_dim, config.decoder_ffn_dim) == (512, 2048, 2048)
        assert (config.encoder_layers, config.decoder_layers) == (6, 6)
        assert (config.encoder_attention_heads, config.decoder_attention_heads) == (8, 8)
        assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0.0, 0.0)
        assert (config.label_smoothing, config.norm_position, config.activation_function) == (0.1, "post", "relu")
        assert (config.position_embedding_type, config.scale_embedding) == ("sinusoidal", True)
        assert (config.share_encoder_decoder_embeddings, config.tie_word_embeddings) == (True, True)
        ids = [getattr(config, f"{name}_token_id") for name in ("unk", "pad", "bos", "eos", "decoder_start")]
        assert ids == [0, 1, 2, 3, 2]

    def test_preset_with_an_override(self):
        config = VanillaTransformerConfig.preset("multi30k-tiny", dropout=0.2, vocab_size=77)
        assert (config.d_model, config.dropout, config.vocab_size) == (128, 0.2, 77)

    def test_names_that_transformers_looks_for(self):
        config = VanillaTransformerConfig.preset("test", encoder_layers=3, encoder_vocab_size=5, vocab_size=9,
                                                 share_encoder_decoder_embeddings=False)  # fmt: skip
        assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 3, 4)
        decoder = config.get_text_config(decoder=True)
        assert (decoder.num_hidden_layers, decoder.vocab_size) == (2, 9)


@pytest.mark.parametrize(
    ("deep", "even", "vocab_size"),
    [("deep-shallow", "paper-base", 37000), ("multi30k-deep-shallow", "multi30k-tiny", 6000)],
)
class TestDeepEncodersWithShallowDecoders:
    def test_only_the_layers_differ(self, deep, even, vocab_size):
        """And the place of the norm where the other one does not train."""
        one, other = (VanillaTransformerConfig.preset(name).to_dict() for name in (deep, even))
        differing = {name for name in one if one[name] != other[name]} - {"norm_position"}
        assert differing == {"encoder_layers", "decoder_layers"}
        assert one["norm_position"] == {"deep-shallow": "post", "multi30k-deep-shallow": "pre"}[deep]
        assert (one["encoder_layers"], one["decoder_layers"]) == (2 * other["encoder_layers"], 1)

    def test_about_as_many_parameters(self, deep, even, vocab_size):
        """In the layers alone, and so all the more with the embeddings, which are the same."""
        embeddings = vocab_size * VanillaTransformerConfig.preset(deep).d_model
        counts = [parameters(name, vocab_size) for name in (deep, even)]
        assert counts[0] - embeddings == pytest.approx(0.95 * (counts[1] - embeddings), rel=0.005)
        assert 0.96 < counts[0] / counts[1] < 0.98

    def test_the_readme_counts_right(self, deep, even, vocab_size):
        readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
        (row,) = [line for line in readme.splitlines() if line.startswith(f"| `{deep}` |") and " tokens |" in line]
        assert f"| {parameters(deep, vocab_size) / 1e6:.1f}M with {vocab_size:,} tokens |" in row


def test_recipes_of_deep_and_even_layers_differ_in_nothing_else():
    recipes = Path(__file__).resolve().parents[1] / "scripts" / "recipes"
    deep, even = (read_recipe(recipes / f"multi30k_en_de_{name}.yaml") for name in ("deep_shallow", "tiny"))
    assert deep == {**even, "preset": "multi30k-deep-shallow"}


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"d_model": 10}, r"d_model=10 does not divide into encoder_attention_heads=8: change one of them or set"),
            ({"decoder_attention_heads": 7}, r"d_model=512 does not divide into decoder_attention_heads=7"),
            *(({name: 0}, rf"{name}=0 is not positive") for name in SIZES),
            *(
                ({name: value}, rf"{name}={value} is not in \[0, 1\)")
                for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
                for value in (-0.1, 1)
            ),
            ({"norm_position": "middle"}, r"norm_position='middle' is not one of post, pre"),
            ({"position_embedding_type": "rotary"}, r"position_embedding_type='rotary' is not one of sinusoidal, lear"),
            ({"activation_function": "rleu"}, r"activation_function='rleu' is not one of .*relu"),
            (
                {"encoder_vocab_size": 9},
                r"encoder_vocab_size=9 means separate vocabularies: set share_encoder_decoder_embeddings=False",
            ),
            (
                {"tie_word_embeddings": False},
                r"tie_word_embeddings=False unties every embedding: set share_encoder_decoder_embeddings=False too",
            ),
            ({"pad_token_id": 0}, r"pad_token_id=0 is taken for 'no padding token' by generate\(\): use another id"),
        ],
        ids=str,
    )
    def test_value(self, fields, message):
        with pytest.raises(StrictDataclassError, match=message):
            VanillaTransformerConfig(**fields)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("d_model", "eight"),
            ("d_model", 512.0),
            ("d_model", True),
            ("dropout", "0.1"),
            ("use_cache", 1),
            ("norm_position", None),
            ("layer_norm_eps", "tiny"),
        ],
    )
    def test_type(self, field, value):
        with pytest.raises(StrictDataclassError, match=field):
            VanillaTransformerConfig(**{field: value})

    @pytest.mark.parametrize(
        ("name", "meant"),
        [("d_modl", "d_model"), ("vocab_sizes", "vocab_size"), ("decoder_vocab_size", "encoder_vocab_size"),
         ("hidden_siz", "hidden_size"), ("labelsmoothing", "label_smoothing")],
    )  # fmt: skip
    def test_misspelt_field(self, name, meant):
        with pytest.raises(ValueError, match=rf"^unknown configuration field '{name}': did you mean '{meant}'\?$"):
            VanillaTransformerConfig(**{name: 8})

    def test_what_others_add_is_loaded_again(self, tmp_path):
        config = VanillaTransformerConfig()
        config.sep_token_id, config.encoder_layerdrop = 3, 0.1
        config.save_pretrained(tmp_path)
        loaded = VanillaTransformerConfig.from_pretrained(tmp_path)
        assert (loaded.sep_token_id, loaded.encoder_layerdrop) == (3, 0.1)

    def test_unknown_preset(self):
        with pytest.raises(
            ValueError, match=r"unknown preset 'paper-bas': choose one of paper-base, paper-big, multi30k-tiny, deep-"
        ):
            VanillaTransformerConfig.preset("paper-bas")

    def test_a_head_size_of_its_own_needs_no_division(self):
        assert VanillaTransformerConfig(d_model=10, head_dim=4).head_dim == 4

    @pytest.mark.parametrize("value", [0, 0.0, 0.5])
    def test_probabilities_may_be_whole_numbers(self, value):
        assert VanillaTransformerConfig(dropout=value).dropout == value


class TestRoundTrip:
    def test_every_field_survives(self, tmp_path):
        """Each field has a value that is not its default."""
        changed = {
            "vocab_size": 50, "encoder_vocab_size": 40, "d_model": 24, "encoder_layers": 3, "decoder_layers": 1,
            "encoder_attention_heads": 2, "decoder_attention_heads": 3, "head_dim": 5, "encoder_ffn_dim": 7,
            "decoder_ffn_dim": 9, "activation_function": "gelu", "attention_bias": False, "norm_position": "pre",
            "layer_norm_eps": 1e-6, "position_embedding_type": "learned", "max_position_embeddings": 33,
            "scale_embedding": False, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False,
            "dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4, "label_smoothing": 0.0,
            "unk_token_id": 4, "pad_token_id": 5, "bos_token_id": 6, "eos_token_id": 7, "decoder_start_token_id": 8,
            "use_cache": False, "is_encoder_decoder": False, "add_final_layer_norm": False, "lm_head_bias": True,
        }  # fmt: skip
        assert sorted(changed) == sorted(OWN_FIELDS)
        VanillaTransformerConfig(**changed).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text()).items() >= changed.items()
        loaded = VanillaTransformerConfig.from_pretrained(tmp_path)
        assert {name: getattr(loaded, name) for name in changed} == changed

    def test_checked_again_when_saved(self, tmp_path):
        config = VanillaTransformerConfig()
        config.dropout = 1.5
        with pytest.raises(StrictDataclassError, match=r"dropout=1\.5"):
            config.save_pretrained(tmp_path)


class TestNoDeadFields:
    # Read inside transformers; what each does is tested in test_modeling_vanilla_transformer.py.
    READ_BY_TRANSFORMERS = frozenset({"use_cache", "is_encoder_decoder", "tie_word_embeddings"})

    def test_every_field_is_read(self):
        assert set(OWN_FIELDS) - fields_read_in_the_package() - self.READ_BY_TRANSFORMERS == set()

    def test_every_field_is_explained(self):
        arguments = VanillaTransformerConfig.__doc__.split("Args:")[1].split("Raises:")[0]
        named = {name.strip() for line in arguments.splitlines() for name in line.split(":")[0].split(",")}
        assert set(OWN_FIELDS) - named - {"is_encoder_decoder"} == set()


def fields_read_in_the_package():
    """Every x of `config.x`, `something.config.x` or `getattr(config, "x")` outside the configuration's own file."""
    read = set()
    for path in Path(hf_vanilla_transformer.__file__).parent.glob("*.py"):
        if path.name == "configuration_vanilla_transformer.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_config(node.value):
                read.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr" and is_config(node.args[0]):
                read |= {field for field in OWN_FIELDS if re.fullmatch(pattern_of(node.args[1]), field)}
    return read


def is_config(node):
    return getattr(node, "attr", getattr(node, "id", None)) == "config"


def pattern_of(name):
    """What the name of a `getattr` may be: itself if it is written out, with gaps if it is an f-string."""
    if isinstance(name, ast.JoinedStr):
        return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in name.values)
    return re.escape(str(name.value)) if isinstance(name, ast.Constant) else ""
