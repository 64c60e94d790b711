"""Four teaching implementations: their weights compute in our model what they compute there, and the reverse."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interchange import export_model, import_model
from hf_vanilla_transformer.teaching_layouts import LAYOUTS
from hf_vanilla_transformer.weight_files import write_weights
from hf_vanilla_transformer.weight_layout import LayoutOptions, check_state, own_config
from teaching_twins import (
    D_FF,
    D_K,
    D_MODEL,
    HEADS,
    LAYERS,
    LOGITS,
    OPTIONS,
    PADDING,
    SOURCE_VOCABULARY,
    TARGET_VOCABULARY,
    TWINS,
    WEIGHTS,
    annotated_weights,
    conv1d_logits,
    conv1d_weights,
    hyunwoongko_weights,
    keras_variables,
    keras_weights,
    sinusoids,
)

FORMATS = sorted(TWINS)
TOLERANCE = 1e-5
NEW_TOKENS = 10
# How the code of a reference is made; the rest of a configuration is free.
OWN = {
    "annotated": {"norm_position": "pre", "layer_norm_eps": 1e-6},
    "hyunwoongko": {"layer_norm_eps": 1e-12},
    "conv1d": {"layer_norm_eps": 1e-5, "head_dim": D_K},
    "keras": {"layer_norm_eps": 1e-6},
    "keras-interleaved": {"layer_norm_eps": 1e-6},
}


def tensors(weights):
    return {name: torch.as_tensor(value) for name, value in weights.items()}


def imported(name, weights, options):
    fields, state = LAYOUTS[name].read(tensors(weights), options)
    config = own_config(fields)
    check_state(config, state)
    model = VanillaTransformerForConditionalGeneration(config)
    model.load_state_dict(state)
    return model.eval()


def exported(name, model):
    """The twin with the weights of a model of ours, in the form of `TWINS`."""
    written = LAYOUTS[name].write(model.config, model.state_dict())
    weights = {key: value.numpy() for key, value in written.items()} if name.startswith("keras") else written
    return partial(LOGITS[name], weights, HEADS, model.config.pad_token_id)


def own_model(name, **overrides):
    """A random model of ours that the format can express, every parameter moved from its first value."""
    torch.manual_seed(5)
    config = VanillaTransformerConfig.preset(
        "test",
        **{
            "d_model": D_MODEL,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_ffn_dim": D_FF,
            "decoder_ffn_dim": D_FF,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "vocab_size": TARGET_VOCABULARY,
            **OWN[name],
            **overrides,
        },
    )
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter += torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1)
            if "encoder_attn.out_proj" in key:  # so that the source matters
                parameter *= 4
    return model


def batch(padding, first=5, vocabulary=SOURCE_VOCABULARY):
    """Ids (3, 7) and (3, 6), padded at the end; none below `first`."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(first, vocabulary, (3, 7), generator=generator)
    target = torch.randint(first, vocabulary, (3, 6), generator=generator)
    source[1, 5:] = source[2, 2:] = target[2, 4:] = padding
    return source, target


@torch.no_grad()
def logit_difference(model, logits, padding, **kwargs):
    """The largest difference at real target positions, over the tokens that the twin knows."""
    source, target = batch(padding)
    theirs = logits(source, target)
    ours = model(input_ids=source, decoder_input_ids=target, **kwargs).logits[..., : theirs.shape[-1]]
    assert theirs.std() > 0.3
    return (ours - theirs)[target != padding].abs().max().item()


def beam_search(logits, source, start, end, beams=4):
    """The best hypothesis for one source (1, S) by mean log-probability, without the start token."""
    running, finished = [(0.0, [start])], []
    for length in range(1, NEW_TOKENS + 1):
        prefixes = torch.tensor([tokens for _, tokens in running])
        scores = logits(source.expand(len(running), -1), prefixes)[:, -1].log_softmax(-1)
        scores = scores + torch.tensor([score for score, _ in running])[:, None]
        best = scores.flatten().topk(2 * beams)
        size = scores.shape[1]
        ranked = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        found = [(score, [*running[index // size][1], index % size]) for score, index in ranked]
        finished += [(s / length, t) for s, t in found[:beams] if t[-1] == end or length == NEW_TOKENS]
        running = [(s, t) for s, t in found if t[-1] != end][:beams]
    return max(finished)[1][1:]


@torch.no_grad()
def assert_same_translations(model, logits, padding, own_padding=None):
    config = model.config
    own_padding = padding if own_padding is None else own_padding
    source, _ = batch(padding)
    expected = [beam_search(logits, row[None], config.decoder_start_token_id, config.eos_token_id) for row in source]
    ours = model.generate(
        source.masked_fill(source == padding, own_padding),
        num_beams=4,
        max_new_tokens=NEW_TOKENS,
        early_stopping="never",
        length_penalty=1.0,
    )
    rows = [row.tolist() for row in ours[:, 1:]]
    padded = [tokens + [own_padding] * (len(rows[0]) - len(tokens)) for tokens in expected]
    assert rows == padded
    assert not any(padding in tokens for tokens in expected), "the references mask padding that they wrote"
    assert len(set(map(tuple, expected))) > 1, "the sources should make a difference"
    return expected


class TestImport:
    @pytest.mark.parametrize("name", FORMATS)
    def test_logits(self, name):
        weights, options, logits = TWINS[name]()
        assert logit_difference(imported(name, weights, options), logits, PADDING[name]) < TOLERANCE

    @pytest.mark.parametrize("name", FORMATS)
    def test_translations(self, name):
        weights, options, logits = TWINS[name]()
        assert_same_translations(imported(name, weights, options), logits, PADDING[name])

    def test_translations_that_end(self):
        weights, options, logits = TWINS["hyunwoongko"]()
        weights["decoder.linear.bias"][3] += 0.8
        expected = assert_same_translations(imported("hyunwoongko", weights, options), logits, PADDING["hyunwoongko"])
        assert any(tokens[-1] == 3 and len(tokens) < NEW_TOKENS for tokens in expected)

    @pytest.mark.parametrize("name", FORMATS)
    def test_back_again(self, name):
        weights = WEIGHTS[name]()
        fields, state = LAYOUTS[name].read(tensors(weights), OPTIONS[name])
        again = LAYOUTS[name].write(own_config(fields), state)
        assert again.keys() == weights.keys()
        for key, value in tensors(weights).items():
            torch.testing.assert_close(
                again[key], value, rtol=1e-6, atol=1e-3 if key.endswith(".pe") else 1e-6, msg=key
            )

    @pytest.mark.parametrize(
        ("name", "key_bias"),
        [
            ("annotated", "decoder.layers.1.src_attn.linears.1.bias"),
            ("hyunwoongko", "decoder.layers.1.enc_dec_attention.w_k.bias"),
            ("conv1d", "decoder.layers.1.dec_enc_attn.W_K.bias"),
            ("keras", "decoder/layers/1/mha2/wk/bias"),
        ],
    )
    def test_the_bias_of_keys_which_changes_no_logit(self, name, key_bias):
        weights = conv1d_weights(biases=True) if name == "conv1d" else WEIGHTS[name]()
        _, state = LAYOUTS[name].read(tensors(weights), OPTIONS[name])
        own = state["model.decoder.stack.layers.1.encoder_attn.k_proj.bias"]
        torch.testing.assert_close(own, torch.as_tensor(weights[key_bias]))

    @pytest.mark.parametrize(
        ("name", "target", "source", "output"),
        [
            ("annotated", "tgt_embed.0.lut.weight", "src_embed.0.lut.weight", "generator.proj.weight"),
            ("hyunwoongko", "decoder.emb.tok_emb.weight", "encoder.emb.tok_emb.weight", "decoder.linear.weight"),
            ("conv1d", "decoder.tgt_emb.weight", "encoder.src_emb.weight", "projection.weight"),
            ("keras", "decoder/embedding/embeddings", "encoder/embedding/embeddings", "final_layer/kernel"),
        ],
    )
    def test_tied_matrices_are_noticed(self, name, target, source, output):
        weights = WEIGHTS[name]()
        weights[output] = weights[target].T if name == "keras" else weights[target]
        model = imported(name, weights, OPTIONS[name])
        assert model.config.tie_word_embeddings
        assert not model.config.share_encoder_decoder_embeddings
        weights[source] = weights[target]
        model = imported(name, weights, OPTIONS[name])
        assert model.config.share_encoder_decoder_embeddings
        assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
        logits = partial(LOGITS[name], weights, HEADS, PADDING[name])
        assert logit_difference(model, logits, PADDING[name]) < TOLERANCE

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("annotated", {"unk": 3, "pad": 2, "bos": 0, "eos": 1, "decoder_start": 0}),
            ("hyunwoongko", {"unk": 0, "pad": 1, "bos": 2, "eos": 3, "decoder_start": 2}),
            ("keras", {"bos": TARGET_VOCABULARY - 2, "eos": TARGET_VOCABULARY - 1}),
        ],
    )
    def test_the_defaults_of_the_reference(self, name, expected):
        fields, _ = LAYOUTS[name].read(tensors(WEIGHTS[name]()), LayoutOptions(num_heads=HEADS))
        assert {key: fields[f"{key}_token_id"] for key in expected} == expected
        fields, _ = LAYOUTS[name].read(tensors(WEIGHTS[name]()), LayoutOptions())
        assert fields["encoder_attention_heads"] == fields["decoder_attention_heads"] == 8

    def test_options_win(self):
        options = LayoutOptions(
            num_heads=2,
            decoder_num_heads=8,
            activation_function="gelu",
            layer_norm_eps=1e-3,
            eos_token_id=7,
            dropout=0.4,
        )
        fields, _ = LAYOUTS["hyunwoongko"].read(hyunwoongko_weights(), options)
        config = own_config(fields)
        assert (config.encoder_attention_heads, config.decoder_attention_heads) == (2, 8)
        assert (config.activation_function, config.layer_norm_eps, config.dropout) == ("gelu", 1e-3, 0.4)
        assert (config.eos_token_id, config.bos_token_id) == (7, 2)

    @pytest.mark.parametrize(("name", "other", "final_norm"), [("annotated", "post", True), ("keras", "pre", False)])
    def test_another_place_of_the_norms(self, name, other, final_norm):
        options = LayoutOptions(num_heads=HEADS, norm_position=other, pad_token_id=1)
        config = imported(name, WEIGHTS[name](), options).config
        assert (config.norm_position, config.add_final_layer_norm) == (other, final_norm)

    @pytest.mark.parametrize("name", FORMATS)
    def test_a_number_of_heads_that_does_not_fit(self, name):
        options = LayoutOptions(num_heads=5, bos_token_id=2, eos_token_id=3)
        with pytest.raises(UserError, match=r"\d\d rows of the query projections do not divide into 5 attention heads"):
            LAYOUTS[name].read(tensors(WEIGHTS[name]()), options)

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("heads", [{"num_heads": 0}, {"num_heads": -4}, {"num_heads": 4, "decoder_num_heads": 0}])
    def test_no_heads(self, name, heads):
        options = LayoutOptions(bos_token_id=2, eos_token_id=3, **heads)
        with pytest.raises(UserError, match=r"do not divide into (0|-4) attention heads: pass --num_heads"):
            LAYOUTS[name].read(tensors(WEIGHTS[name]()), options)

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("shape", [(), (7,)])
    def test_tensors_without_axes(self, name, shape):
        """In the place of each tensor in turn."""
        weights = tensors(WEIGHTS[name]())
        for key, value in weights.items():
            if len(shape) < value.dim():
                with pytest.raises(UserError, match=r"has . axes, not .|table of positions has two axes"):
                    imported(name, {**weights, key: torch.zeros(shape)}, OPTIONS[name])

    @pytest.mark.parametrize("name", FORMATS)
    def test_the_weights_of_something_else(self, name):
        with pytest.raises(UserError, match=r"does not know: bert.pooler.*is it another --format"):
            LAYOUTS[name].read(tensors(WEIGHTS[name]()) | {"bert.pooler": torch.ones(1)}, OPTIONS[name])

    @pytest.mark.parametrize(
        ("name", "missing"),
        [
            ("annotated", "generator.proj.weight"),
            ("hyunwoongko", "encoder.emb.tok_emb.weight"),
            ("conv1d", "decoder.tgt_emb.weight"),
            ("keras", "final_layer/kernel"),
        ],
    )
    def test_a_missing_matrix_is_called_as_there(self, name, missing):
        weights = tensors(WEIGHTS[name]())
        del weights[missing]
        with pytest.raises(UserError, match=f"the weights hold no {missing.replace('/', '.')}: is it another --format"):
            LAYOUTS[name].read(weights, OPTIONS[name])


@pytest.mark.parametrize(
    ("name", "ending"), [("annotated", ".pt"), ("conv1d", ".safetensors"), ("hyunwoongko", ".npz"), ("keras", ".npz")]
)
def test_through_files(name, ending, tmp_path, capsys):
    """And back with the options that the export names."""
    weights, options, logits = TWINS[name]()
    write_weights(tensors(weights), tmp_path / f"theirs{ending}")
    model = import_model(tmp_path / f"theirs{ending}", name, options)
    assert logit_difference(model, logits, PADDING[name]) < TOLERANCE
    notes = export_model(model, name, tmp_path / f"ours{ending}")
    assert notes[0] == LAYOUTS[name].advice(model.config)
    flags = notes[1].removeprefix("to import it again: ").split()
    command = ["import", str(tmp_path / f"ours{ending}"), "--format", name, "--output", str(tmp_path / "ours")]
    assert main([*command, *flags]) == 0
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert logit_difference(again, logits, PADDING[name]) < TOLERANCE
    printed = capsys.readouterr().out
    assert f"taken for given: {' '.join(flags)}: " in printed
    moved = f"the source pads with token 0, as generate() cannot: padding is now the token {again.config.pad_token_id},"
    assert (moved in printed) == (PADDING[name] == 0)


class TestExport:
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize(
        "overrides",
        [
            {},
            {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False, "lm_head_bias": True},
            {"scale_embedding": False, "attention_bias": False},
            {"share_encoder_decoder_embeddings": False, "encoder_vocab_size": SOURCE_VOCABULARY, "lm_head_bias": True},
        ],
        ids=["three-way tying", "no tying", "no scale, no biases", "two vocabularies"],
    )
    def test_logits(self, name, overrides):
        model = own_model(name, **overrides)
        assert logit_difference(model, exported(name, model), model.config.pad_token_id) < TOLERANCE

    @pytest.mark.parametrize("name", FORMATS)
    def test_translations(self, name):
        model = own_model(name, tie_word_embeddings=False, share_encoder_decoder_embeddings=False, lm_head_bias=True)
        with torch.no_grad():
            model.lm_head.bias[model.config.pad_token_id] = -20
        assert_same_translations(model, exported(name, model), model.config.pad_token_id)

    @pytest.mark.parametrize("name", FORMATS)
    def test_what_the_reference_expects_in_the_file(self, name):
        sizes = {"share_encoder_decoder_embeddings": False, "encoder_vocab_size": SOURCE_VOCABULARY}
        model = own_model(name, attention_bias=name != "conv1d", max_position_embeddings=40, **sizes)
        written = LAYOUTS[name].write(model.config, model.state_dict())
        expected = tensors(WEIGHTS[name]())
        assert {key: value.shape for key, value in written.items()} == {k: v.shape for k, v in expected.items()}

    @pytest.mark.parametrize("name", FORMATS)
    def test_the_model_stays_as_it_is(self, name):
        model = own_model(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        LAYOUTS[name].write(model.config, model.state_dict())
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"activation_function": "gelu"}, r"activation_function='gelu' cannot be written as .*'relu'"),
            ({"layer_norm_eps": 0.5}, r"layer_norm_eps=0.5 cannot be written as .*whose code has .*in config.json"),
            ({"decoder_attention_heads": 2}, r"decoder_attention_heads=2 cannot be written as .*_heads=4$"),
            ({"decoder_layers": 1}, r"decoder_layers=1 cannot be written as .*_layers=2$"),
            ({"decoder_ffn_dim": 64}, r"decoder_ffn_dim=64 cannot be written as .*_ffn_dim=48$"),
        ],
    )
    def test_what_no_format_can_express(self, name, overrides, message):
        model = own_model(name, **overrides)
        with pytest.raises(UserError, match=message):
            LAYOUTS[name].write(model.config, model.state_dict())

    @pytest.mark.parametrize("name", FORMATS)
    def test_the_place_of_the_norms(self, name):
        pre = OWN[name].get("norm_position") == "pre"
        model = own_model(name, norm_position="post" if pre else "pre")
        with pytest.raises(UserError, match=rf"norm_position='p\w+' cannot be written as {name}"):
            LAYOUTS[name].write(model.config, model.state_dict())
        model = own_model(name, add_final_layer_norm=not pre)
        with pytest.raises(
            UserError, match=f"add_final_layer_norm={not pre} cannot be written as {name}: its code has"
        ):
            LAYOUTS[name].write(model.config, model.state_dict())
        model = own_model(name, add_final_layer_norm=pre)
        assert logit_difference(model, exported(name, model), model.config.pad_token_id) < TOLERANCE

    @pytest.mark.parametrize("name", sorted({*FORMATS} - {"conv1d"}))
    def test_what_only_conv1d_can_express(self, name):
        for overrides, message in (
            ({"position_embedding_type": "learned"}, "position_embedding_type='learned' cannot be written as"),
            ({"head_dim": D_K}, f"head_dim={D_K} cannot be written as"),
        ):
            model = own_model(name, **overrides)
            with pytest.raises(UserError, match=message):
                LAYOUTS[name].write(model.config, model.state_dict())
        model = own_model(name, head_dim=D_MODEL // HEADS)
        assert LAYOUTS[name].write(model.config, model.state_dict())

    @pytest.mark.parametrize("name", FORMATS)
    def test_advice(self, name):
        size = D_K if name == "conv1d" else 8
        expected = (
            f"build the model with 4 heads of size {size}; decoding starts with token 2 and ends with 3; "
            "the masks have to hide token 1"
        )
        assert LAYOUTS[name].advice(own_model(name).config) == expected


class TestPaddingZero:
    """The references whose padding is token 0, which cannot be ours."""

    def weights(self, name, target_vocabulary=TARGET_VOCABULARY):
        """`target_vocabulary` may be the smaller one."""
        weights = WEIGHTS[name]()
        for key, axis in {
            "decoder.tgt_emb.weight": 0,
            "projection.weight": 0,
            "decoder/embedding/embeddings": 0,
            "final_layer/kernel": 1,
            "final_layer/bias": 0,
        }.items():
            if key in weights:
                weights[key] = np.ascontiguousarray(np.asarray(weights[key]).take(range(target_vocabulary), axis))
                weights[key] = torch.as_tensor(weights[key]) if name == "conv1d" else weights[key]
        return weights

    def options(self):
        return LayoutOptions(num_heads=HEADS, bos_token_id=5, eos_token_id=6)

    @pytest.mark.parametrize("target_vocabulary", [TARGET_VOCABULARY, SOURCE_VOCABULARY, SOURCE_VOCABULARY - 3])
    @pytest.mark.parametrize("name", ["conv1d", "keras"])
    def test_logits_and_translations(self, name, target_vocabulary):
        weights = self.weights(name, target_vocabulary)
        model = imported(name, weights, self.options())
        logits = partial(LOGITS[name], weights, HEADS, 0)
        config = model.config
        assert config.pad_token_id == max(SOURCE_VOCABULARY, target_vocabulary)
        source, target = batch(0, vocabulary=min(SOURCE_VOCABULARY, target_vocabulary))
        own_source = source.masked_fill(source == 0, config.pad_token_id)
        with torch.no_grad():
            ours = model(input_ids=own_source, decoder_input_ids=target).logits
            given = model(input_ids=source, attention_mask=source != 0, decoder_input_ids=target).logits
        theirs = logits(source, target)
        difference = (ours[..., :target_vocabulary] - theirs)[target != 0].abs().max()
        assert difference < TOLERANCE
        torch.testing.assert_close(ours, given)
        own = ours.softmax(-1)[..., target_vocabulary:]
        assert own.shape[-1] > 0
        assert (own < 1e-30).all()
        expected = beam_search(logits, source[:1], 5, 6)
        hypothesis = model.generate(own_source[:1], num_beams=4, max_new_tokens=NEW_TOKENS, early_stopping="never")
        assert hypothesis[0, 1:].tolist() == expected

    @pytest.mark.parametrize("name", ["conv1d", "keras"])
    def test_back_again(self, name):
        weights = self.weights(name)
        fields, state = LAYOUTS[name].read(tensors(weights), self.options())
        again = LAYOUTS[name].write(own_config(fields), state)
        expected = tensors(weights)
        assert LAYOUTS[name].advice(own_config(fields)).endswith("token 29, or 0 if that was imported as padding")
        assert again.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(again[key], expected[key], rtol=1e-6, atol=1e-6, msg=key)

    def test_a_joint_vocabulary_stays_joint(self):
        weights = self.weights("conv1d", SOURCE_VOCABULARY)
        weights["encoder.src_emb.weight"] = weights["projection.weight"] = weights["decoder.tgt_emb.weight"]
        config = imported("conv1d", weights, self.options()).config
        assert config.share_encoder_decoder_embeddings
        assert config.encoder_vocab_size is None
        assert config.vocab_size == SOURCE_VOCABULARY + 1


class TestAnnotated:
    def test_the_layer_norms_agree(self):
        """The bound that the docstring of the translation promises, in float64."""
        deviations = torch.logspace(math.log10(0.5), 3, 2000, dtype=torch.float64)
        for d_model in (32, 512, 1024):
            ours = torch.sqrt(deviations**2 * (d_model - 1) / d_model + 1e-6) * (d_model / (d_model - 1)) ** 0.5
            assert ((deviations + 1e-6) / ours - 1).abs().max() < 5e-7

    def test_sinusoids_deviate_by_half(self):
        for d_model in (32, 128, 512):
            angles = torch.arange(100)[:, None] / 10000 ** (torch.arange(0, d_model, 2) / d_model)
            assert torch.cat([angles.sin(), angles.cos()], dim=1).std(-1).min() > 0.45

    def test_tables_may_be_missing_and_shorter(self):
        weights = annotated_weights()
        fields, _ = LAYOUTS["annotated"].read(weights, OPTIONS["annotated"])
        assert fields["max_position_embeddings"] == 5000
        fields, _ = LAYOUTS["annotated"].read(weights, LayoutOptions(num_heads=HEADS, max_position_embeddings=70))
        assert fields["max_position_embeddings"] == 70
        del weights["src_embed.1.pe"], weights["tgt_embed.1.pe"]
        fields, _ = LAYOUTS["annotated"].read(weights, OPTIONS["annotated"])
        assert "max_position_embeddings" not in fields

    def test_other_positions(self):
        weights = annotated_weights()
        weights["tgt_embed.1.pe"] = weights["tgt_embed.1.pe"].roll(1, dims=-1)
        with pytest.raises(UserError, match=r"tgt_embed\.1\.pe does not hold the sinusoids of the paper"):
            LAYOUTS["annotated"].read(weights, OPTIONS["annotated"])

    def test_more_positions_than_the_reference_makes(self):
        model = own_model("annotated", max_position_embeddings=6000)
        written = LAYOUTS["annotated"].write(model.config, model.state_dict())
        assert written["src_embed.1.pe"].shape == (1, 6000, D_MODEL)


def test_hyunwoongko_with_its_table_as_a_buffer():
    weights = hyunwoongko_weights() | {f"{side}.emb.pos_emb.encoding": sinusoids(77) for side in ("encoder", "decoder")}
    assert imported("hyunwoongko", weights, OPTIONS["hyunwoongko"]).config.max_position_embeddings == 77
    weights["encoder.emb.pos_emb.encoding"] += 0.1
    with pytest.raises(UserError, match=r"encoder\.emb\.pos_emb\.encoding does not hold the sinusoids"):
        LAYOUTS["hyunwoongko"].read(weights, OPTIONS["hyunwoongko"])


class TestConv1d:
    read = staticmethod(partial(imported, "conv1d", options=OPTIONS["conv1d"]))

    @pytest.mark.parametrize("learned_positions", [False, True])
    @pytest.mark.parametrize("norms", [False, True])
    @pytest.mark.parametrize("biases", [False, True])
    def test_what_copies_leave_out(self, biases, norms, learned_positions):
        weights = conv1d_weights(0, biases, norms, learned_positions)
        model = self.read(weights)
        assert model.config.attention_bias == biases
        assert model.config.head_dim == D_K
        assert model.config.position_embedding_type == ("learned" if learned_positions else "sinusoidal")
        logits = partial(conv1d_logits, weights, HEADS, 1)
        assert logit_difference(model, logits, 1) < TOLERANCE
        assert logit_difference(model, exported("conv1d", model), 1) < TOLERANCE

    def test_a_bias_of_the_output_projection_alone(self):
        weights = conv1d_weights(biases=True)
        weights = {key: value for key, value in weights.items() if not re.search(r"W_[QKV]\.bias|conv\d\.bias", key)}
        assert logit_difference(self.read(weights), partial(conv1d_logits, weights, HEADS, 1), 1) < TOLERANCE

    def test_other_words(self):
        weights = conv1d_weights(biases=True)
        expected = self.read(weights).state_dict()
        words = {r"attn\.fc\.": "attn.linear."}
        assert_same_state(self.read(renamed(weights, words)).state_dict(), expected)
        words = {"conv1": "fc.0", "conv2": "fc.2", r"pos_emb\.weight": "pos_emb.pe"}
        weights = renamed(weights, words)
        for side in ("encoder", "decoder"):
            weights[f"{side}.pos_emb.pe"] = weights[f"{side}.pos_emb.pe"][:, None]
            for layer in range(LAYERS):
                for i in (0, 2):
                    weights[f"{side}.layers.{layer}.pos_ffn.fc.{i}.weight"].squeeze_(-1)
        assert_same_state(self.read(weights).state_dict(), expected)

    def test_no_table_of_positions(self):
        weights = {key: value for key, value in conv1d_weights().items() if "pos_emb" not in key}
        config = self.read(
            weights, options=LayoutOptions(4, bos_token_id=2, eos_token_id=3, max_position_embeddings=9)
        ).config
        assert (config.position_embedding_type, config.max_position_embeddings) == ("sinusoidal", 9)

    def test_one_table_of_positions(self):
        weights = conv1d_weights()
        del weights["decoder.pos_emb.weight"]
        with pytest.raises(UserError, match=r"only one of encoder\.pos_emb and decoder\.pos_emb is there"):
            self.read(weights)

    def test_values_of_another_size(self):
        weights = conv1d_weights()
        key = "decoder.layers.1.dec_enc_attn.W_V.weight"
        weights[key] = weights[key][:40]
        with pytest.raises(UserError, match=r"W_Q has 48 rows and W_V 40: our heads have d_k = d_v"):
            self.read(weights)

    @pytest.mark.parametrize("missing", ["bos_token_id", "eos_token_id"])
    def test_tokens_that_only_the_user_knows(self, missing):
        options = {"bos_token_id": 2, "eos_token_id": 3, missing: None}
        with pytest.raises(UserError, match=f"conv1d: pass --{missing}: every copy"):
            self.read(conv1d_weights(), options=LayoutOptions(num_heads=HEADS, **options))

    def test_an_output_bias(self):
        model = own_model("conv1d", lm_head_bias=True)
        assert "projection.bias" in LAYOUTS["conv1d"].write(model.config, model.state_dict())
        with torch.no_grad():
            model.lm_head.bias.zero_()
        assert "projection.bias" not in LAYOUTS["conv1d"].write(model.config, model.state_dict())


def renamed(weights, words):
    names = {}
    for name in weights:
        new = name
        for pattern, word in words.items():
            new = re.sub(pattern, word, new)
        names[new] = weights[name].clone()
    assert names.keys() != weights.keys()
    return names


def assert_same_state(state, expected):
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


class TestKerasNames:
    def read(self, weights):
        return imported("keras", weights, OPTIONS["keras"]).state_dict()

    @pytest.mark.parametrize(
        "already",
        [
            None,
            {"dense": 97, "multi_head_attention": 8, "encoder_layer": 9, "decoder_layer": 1, "layer_normalization": 7},
        ],
        ids=["first model", "after others"],
    )
    def test_variables(self, already):
        weights = keras_weights()
        variables = keras_variables(weights, already)
        assert "transformer/encoder/encoder_layer/multi_head_attention/dense/kernel:0" in variables or already
        shuffled = dict(sorted(variables.items(), key=lambda item: item[0][::-1]))
        assert_same_state(self.read(shuffled), self.read(weights))

    def test_the_names_of_variables_are_those_of_keras(self):
        names = list(keras_variables(keras_weights()))
        assert names[1] == "transformer/encoder/encoder_layer/multi_head_attention/dense/kernel:0"
        assert names[9] == "transformer/encoder/encoder_layer/sequential/dense_4/kernel:0"
        assert names[14] == "transformer/encoder/encoder_layer/layer_normalization/beta:0"
        assert names[17] == "transformer/encoder/encoder_layer_1/multi_head_attention_1/dense_6/kernel:0"
        assert names[33] == "transformer/decoder/embedding_1/embeddings:0"
        assert names[-1] == "transformer/dense_32/bias:0"

    @pytest.mark.parametrize(
        "form",
        [
            "transformer/{}",
            "transformer_3/{}:0",
            "model/{}/.ATTRIBUTES/VARIABLE_VALUE",
        ],
    )
    def test_attributes(self, form):
        weights = keras_weights()
        assert_same_state(self.read({form.format(name): x for name, x in weights.items()}), self.read(weights))

    def test_a_checkpoint(self):
        weights = keras_weights()
        names = {}
        for name in weights:
            new = re.sub(r"^(enc|dec)oder/layers", r"\1oder/\1_layers", name).replace("ffn/", "ffn/layer_with_weights-")
            names[f"transformer/{new}/.ATTRIBUTES/VARIABLE_VALUE"] = weights[name]
        assert any("enc_layers/0/ffn/layer_with_weights-1/kernel" in name for name in names)
        assert_same_state(self.read(names), self.read(weights))

    def test_the_second_encoder_of_a_program(self):
        weights = keras_weights()
        variables = {re.sub("/(encoder|decoder)/", r"/\1_1/", name): x for name, x in keras_variables(weights).items()}
        assert_same_state(self.read(variables), self.read(weights))

    def test_two_models_at_once(self):
        weights = keras_weights()
        weights |= {f"transformer_1/{name}": x for name, x in weights.items()}
        message = r"encoder/embedding/embeddings and transformer_1/encoder/embedding/embeddings are the same variable"
        with pytest.raises(UserError, match=message):
            self.read(weights)

    def test_the_order_in_a_file_is_that_of_set_weights(self, tmp_path):
        model = own_model("keras", encoder_vocab_size=SOURCE_VOCABULARY, share_encoder_decoder_embeddings=False)
        write_weights(LAYOUTS["keras"].write(model.config, model.state_dict()), tmp_path / "keras.npz")
        with np.load(tmp_path / "keras.npz") as file:
            assert file.files == list(keras_weights())
