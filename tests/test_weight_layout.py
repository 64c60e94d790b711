"""The tools that layouts are made of: names, fused matrices, the order of the residual stream, positions, checks."""

import math
import re

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.embeddings import sinusoid_table
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.weight_layout import (
    LayoutOptions,
    check_state,
    count_layers,
    embedding_fields,
    final_norm_fields,
    halved_order,
    interleaved_order,
    inverted,
    is_sinusoid_table,
    join_fused,
    move_padding,
    move_padding_back,
    own_config,
    own_state,
    permute_residual,
    position_fields,
    position_table,
    position_tables,
    rename,
    require_equal_sides,
    require_plain_heads,
    required,
    shortened,
    split_fused,
    stack_fields,
    tensor_names,
    zero_biases,
)

TOKENS = ("unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
SMALL_SOURCE = {"encoder_vocab_size": 9, "share_encoder_decoder_embeddings": False}
SOURCE, TARGET = torch.tensor([[5, 6, 7, 3], [8, 9, 3, 1]]), torch.tensor([[2, 4, 5], [2, 6, 7]])


def random_model(seed=0, **overrides):
    torch.manual_seed(seed)
    config = VanillaTransformerConfig.preset("test", vocab_size=20, **overrides)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tensors(*names):
    return {name: torch.full((2,), float(number)) for number, name in enumerate(names)}


class TestNames:
    NAMES = tensor_names({"enc.{}.attn.0": "model.layers.{}.q", "embed.0": "model.embed"})

    def test_there_and_back(self):
        foreign = tensors("enc.0.attn.0.weight", "enc.11.attn.0.bias", "embed.0.weight")
        ours = rename(foreign, self.NAMES)
        assert list(ours) == ["model.layers.0.q.weight", "model.layers.11.q.bias", "model.embed.weight"]
        back = rename(ours, inverted(self.NAMES))
        assert back.keys() == foreign.keys()
        assert all(back[name] is tensor for name, tensor in foreign.items())

    def test_other_words_for_weight_and_bias(self):
        assert tensor_names({"a": "b"}, {"gamma": "weight"}) == {"a.gamma": "b.weight"}

    def test_what_is_not_in_the_table_is_named(self):
        with pytest.raises(UserError, match=re.escape("does not know: embed.1.weight, enc.0.attn.1.weight: is it")):
            rename(tensors("enc.0.attn.1.weight", "embed.0.bias", "embed.1.weight"), self.NAMES)

    def test_long_lists_are_shortened(self):
        assert shortened(f"t{number}" for number in range(9)) == "t0, t1, t2, t3, t4, t5 and 3 more"

    def test_required(self):
        assert required(tensors("a"), "a").tolist() == [0.0, 0.0]
        with pytest.raises(UserError, match="the weights hold no b: is it another --format"):
            required(tensors("a"), "b")

    def test_layers_are_counted(self):
        names = [f"enc.{number}.fc.weight" for number in range(11)] + ["encoder.77.fc.weight", "dec.0.weight"]
        assert count_layers(tensors(*names), "enc.{}.") == 11

    @pytest.mark.parametrize(
        ("names", "message"),
        [(["a.0.b"], "hold no enc.0.*: is it another"), (["enc.0.a", "enc.2.a"], "hold no enc.1.*, but later layers")],
    )
    def test_no_layers_or_a_gap(self, names, message):
        with pytest.raises(UserError, match=re.escape(message)):
            count_layers(tensors(*names), "enc.{}.")


class TestAxes:
    NAMES = tensor_names({"a": "model.decoder.embed_tokens", "b": "lm_head", "c": "x_add_norm.norm"})
    SHAPES = (("a.weight", (3, 2)), ("b.weight", (3, 2)), ("b.bias", (3,)), ("c.weight", (2,)))

    def state(self, **changes):
        return {name: torch.ones(shape) for name, shape in {**dict(self.SHAPES), **changes}.items()}

    def test_vectors_and_matrices(self):
        assert len(own_state(self.state(), self.NAMES)) == 4
        assert len(own_state({"c.bias": torch.ones(2)}, self.NAMES, embeddings=False)) == 1

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            (
                "a.weight",
                (3,),
                "the tensor for model.decoder.embed_tokens.weight has 1 axes, not 2: is it another --format?",
            ),
            ("b.weight", (), "the tensor for lm_head.weight has 0 axes, not 2"),
            ("b.bias", (), "the tensor for lm_head.bias has 0 axes, not 1"),
            ("c.weight", (2, 1), "the tensor for x_add_norm.norm.weight has 2 axes, not 1"),
        ],
    )
    def test_others(self, name, shape, message):
        with pytest.raises(UserError, match=re.escape(message)):
            own_state(self.state(**{name: shape}), self.NAMES)


class TestFused:
    PARTS = ("q.weight", "k.weight", "v.weight")

    def test_the_pieces_in_their_order(self):
        fused = {"a.in_weight": torch.arange(12.0).view(6, 2), "a.out": torch.ones(1)}
        split = split_fused(fused, "in_weight", self.PARTS)
        assert split["a.q.weight"].tolist() == [[0, 1], [2, 3]]
        assert split["a.v.weight"].tolist() == [[8, 9], [10, 11]]
        joined = join_fused(split, "in_weight", self.PARTS)
        assert joined.keys() == fused.keys()
        assert torch.equal(joined["a.in_weight"], fused["a.in_weight"])

    @pytest.mark.parametrize("fused", [torch.tensor(1.0), torch.ones(7, 2), torch.ones(1)])
    def test_what_has_no_three_pieces(self, fused):
        with pytest.raises(UserError, match=r"a\.in_weight of shape \(.*\) does not divide into 3"):
            split_fused({"a.in_weight": fused}, "in_weight", self.PARTS)


class TestResidualAxis:
    @pytest.mark.parametrize("d_model", [2, 7, 8, 33])
    def test_the_orders_are_inverse_and_sort_sines_from_cosines(self, d_model):
        table = sinusoid_table(5, d_model)
        halved = table[:, halved_order(d_model)]
        position = torch.arange(5.0)
        for column in range((d_model + 1) // 2):
            frequency = 10000.0 ** (-2 * column / d_model)
            torch.testing.assert_close(halved[:, column], (position * frequency).sin(), atol=1e-6, rtol=0)
            if column < d_model // 2:
                cosine = halved[:, math.ceil(d_model / 2) + column]
                torch.testing.assert_close(cosine, (position * frequency).cos(), atol=1e-6, rtol=0)
        assert torch.equal(halved[:, interleaved_order(d_model)], table)

    @pytest.mark.parametrize(
        "overrides",
        [
            {"lm_head_bias": True, "add_final_layer_norm": True},
            {"norm_position": "pre", "head_dim": 5, "share_encoder_decoder_embeddings": False},
        ],
    )
    def test_any_order_computes_the_same(self, overrides):
        """With learned positions, which are permuted too."""
        model = random_model(position_embedding_type="learned", **overrides)
        state = permute_residual(dict(model.state_dict()), torch.randperm(32))
        permuted = random_model(1, position_embedding_type="learned", **overrides)
        permuted.load_state_dict(state)
        with torch.no_grad():
            expected, found = (m(SOURCE, decoder_input_ids=TARGET).logits for m in (model, permuted))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert not torch.equal(state["lm_head.weight"], model.state_dict()["lm_head.weight"])


class TestPositions:
    def test_sinusoids_are_recognised_in_float32(self):
        positions, rates = torch.arange(5000.0), torch.exp(torch.arange(0, 64, 2) * (-math.log(10000.0) / 64))
        angles = torch.outer(positions, rates)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        assert is_sinusoid_table(table)
        assert not is_sinusoid_table(table[1:])
        assert not is_sinusoid_table(table[:, halved_order(64)])
        table[17, 3] += 1e-4
        assert not is_sinusoid_table(table)

    def test_fields(self):
        table = sinusoid_table(9, 8)
        assert position_fields(table) == ({"position_embedding_type": "sinusoidal", "max_position_embeddings": 9}, {})
        settings, learned = position_fields(table, table + 1, limit=5)
        assert settings == {"position_embedding_type": "learned", "max_position_embeddings": 5}
        assert torch.equal(learned["model.encoder.embed_positions.weight"], table[:5])
        assert torch.equal(learned["model.decoder.embed_positions.weight"], table[:5] + 1)

    @pytest.mark.parametrize("shape", [(9, 8), (9, 1, 8), (1, 9, 8)])
    def test_the_shapes_of_a_table(self, shape):
        assert position_table("pe", torch.ones(shape)).shape == (9, 8)

    @pytest.mark.parametrize("shape", [(), (9,)])
    def test_what_is_no_table(self, shape):
        with pytest.raises(UserError, match=r"pe has the shape \(.*\): a table of positions has two axes"):
            position_table("pe", torch.ones(shape))

    def test_tables_of_different_lengths(self):
        with pytest.raises(
            UserError, match="encoder has 9 positions and the decoder 7: pass --max_position_embeddings"
        ):
            position_fields(torch.ones(9, 8), torch.ones(7, 8))

    @pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
    def test_tables_of_our_models(self, kind):
        model = random_model(position_embedding_type=kind)
        tables = position_tables(model.config, dict(model.state_dict()))
        for side, table in zip((model.model.encoder, model.model.decoder), tables, strict=True):
            assert torch.equal(side.embed_positions(torch.arange(64), 64), table)


class TestFields:
    @pytest.mark.parametrize(
        "overrides",
        [
            {},
            {"share_encoder_decoder_embeddings": False, "lm_head_bias": True},
            {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
            {"share_encoder_decoder_embeddings": False, "encoder_vocab_size": 31, "encoder_layers": 3},
            {"encoder_ffn_dim": 40, "decoder_layers": 1, "norm_position": "pre"},
            {"add_final_layer_norm": True},
            {"norm_position": "pre", "add_final_layer_norm": False},
        ],
    )
    def test_they_are_read_from_the_weights(self, overrides):
        model = random_model(**overrides)
        state = dict(model.state_dict())
        found = embedding_fields(state, LayoutOptions()) | stack_fields(state)
        found |= final_norm_fields(state, model.config.norm_position)
        assert found == {name: getattr(model.config, name) for name in found}
        assert overrides.keys() <= found.keys()

    def test_vocabularies_that_happen_to_be_of_equal_size(self):
        state = dict(random_model().state_dict())
        found = embedding_fields(state, LayoutOptions(encoder_vocab_size=20, vocab_size=20))
        assert (found["encoder_vocab_size"], found["share_encoder_decoder_embeddings"]) == (20, False)

    @pytest.mark.parametrize("name", ["vocab_size", "encoder_vocab_size"])
    def test_sizes_that_the_weights_contradict(self, name):
        with pytest.raises(
            UserError, match=f"^{name}=99, but the weights have embeddings of 20 tokens: leave --{name} out"
        ):
            embedding_fields(dict(random_model().state_dict()), LayoutOptions(**{name: 99}))

    def test_options_before_defaults(self):
        options = LayoutOptions(num_heads=2, pad_token_id=5).over(LayoutOptions(num_heads=4, eos_token_id=0))
        assert options == LayoutOptions(num_heads=2, pad_token_id=5, eos_token_id=0)
        assert options.config_fields() == {"pad_token_id": 5, "eos_token_id": 0}

    def test_heads(self):
        heads = LayoutOptions(num_heads=4, decoder_num_heads=2).head_fields(32, default=8)
        assert heads == {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
        assert set(LayoutOptions().head_fields(32, default=8).values()) == {8}

    @pytest.mark.parametrize("heads", [0, -4, 5])
    def test_heads_that_do_not_divide(self, heads):
        message = f"32 rows of the query projections do not divide into {heads} attention heads: pass --num_heads"
        with pytest.raises(UserError, match=message):
            LayoutOptions(num_heads=heads).head_fields(32, default=8)

    def test_plain_heads(self):
        config = VanillaTransformerConfig.preset("test", head_dim=8, encoder_attention_heads=2)
        with pytest.raises(UserError, match=r"head_dim=8 cannot be written as torch: its 2 heads divide d_model=32"):
            require_plain_heads("torch", config)
        require_plain_heads("torch", VanillaTransformerConfig.preset("test", head_dim=8))

    def test_equal_sides(self):
        config = VanillaTransformerConfig.preset("test", encoder_ffn_dim=40, decoder_ffn_dim=48)
        message = "decoder_ffn_dim=48 cannot be written as torch: .* and encoder_ffn_dim=40"
        with pytest.raises(UserError, match=message):
            require_equal_sides("torch", config, "layers", "ffn_dim")
        require_equal_sides("torch", config, "layers", "attention_heads")


class TestPadding:
    @pytest.mark.parametrize("source_vocabulary", [None, 9, 31])
    def test_there_and_back(self, source_vocabulary):
        separate = {"encoder_vocab_size": source_vocabulary, "share_encoder_decoder_embeddings": False}
        overrides = separate if source_vocabulary else {}
        state = dict(random_model(**overrides).state_dict())
        moved, grown = move_padding({"vocab_size": 20, "pad_token_id": 0, **overrides}, state)
        padding = max(20, source_vocabulary or 0)
        assert (moved["vocab_size"], moved["pad_token_id"], moved["lm_head_bias"]) == (padding + 1, padding, True)
        assert moved.get("encoder_vocab_size") == (padding + 1 if source_vocabulary else None)
        config = VanillaTransformerConfig.preset("test", **moved)
        check_state(config, grown)
        back = move_padding_back(config, grown)
        assert not back.pop("lm_head.bias").any()
        assert back.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(back[name], tensor, atol=0, rtol=0)

    @pytest.mark.parametrize("smoothing", [None, 0.1])
    @pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
    @pytest.mark.parametrize("source_vocabulary", [None, 9, 31])
    def test_back_after_further_training(self, source_vocabulary, optimizer, smoothing):
        separate = {"encoder_vocab_size": source_vocabulary, "share_encoder_decoder_embeddings": False}
        overrides = separate if source_vocabulary else {}
        state = dict(random_model(**overrides).state_dict())
        moved, grown = move_padding({"vocab_size": 20, "pad_token_id": 0, **overrides}, state)
        moved |= {} if smoothing is None else {"label_smoothing": smoothing}
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **moved)).train()
        model.load_state_dict(grown)
        padding = model.config.pad_token_id
        source = SOURCE.clamp(max=8).masked_fill(SOURCE.eq(1), padding)
        labels = torch.tensor([[4, 5, 3], [6, 3, -100]])
        trained, losses = optimizer(model.parameters(), lr=0.1, weight_decay=0.0), []
        for _ in range(3):
            trained.zero_grad()
            losses.append(model(source, decoder_input_ids=TARGET, labels=labels).loss)
            losses[-1].backward()
            trained.step()
        assert losses[0] < 20, "a token that never comes out should not cost more than all others"
        after = dict(model.state_dict())
        assert (after["lm_head.bias"][20:] < -99).all()
        assert torch.equal(after["lm_head.bias"][20:], grown["lm_head.bias"][20:]) is (smoothing is None)
        back = move_padding_back(model.config, after)
        assert {name: back[name].shape for name in state} == {name: tensor.shape for name, tensor in state.items()}
        assert not torch.equal(back["lm_head.weight"], state["lm_head.weight"])

    def test_any_other_padding_stays(self):
        model = random_model(lm_head_bias=True)
        settings, state = {"pad_token_id": 1}, dict(model.state_dict())
        assert move_padding(settings, state) == (settings, state)
        assert move_padding_back(model.config, state) == state


class TestChecks:
    def test_a_whole_state(self):
        model = random_model(attention_bias=False)
        check_state(model.config, dict(model.state_dict()))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("lm_head.weight"), "missing: lm_head.weight"),
            (lambda state: state.update(extra=torch.ones(1)), "left over: extra"),
            (lambda state: state.update({"lm_head.weight": torch.ones(3, 32)}), "of another shape: lm_head.weight"),
        ],
    )
    def test_an_incomplete_state(self, change, message):
        model = random_model()
        state = dict(model.state_dict())
        change(state)
        with pytest.raises(UserError, match=f"the weights do not make a whole model: {message}"):
            check_state(model.config, state)

    def test_biases_of_zero_change_nothing(self):
        model = random_model(attention_bias=False)
        state = zero_biases(model.config, dict(model.state_dict()))
        biased = random_model(1, attention_bias=True, lm_head_bias=True)
        biased.load_state_dict(state)
        with torch.no_grad():
            expected, found = (m(SOURCE, decoder_input_ids=TARGET).logits for m in (model, biased))
        torch.testing.assert_close(found, expected, atol=0, rtol=0)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"norm_position": "middle"}, "cannot be expressed: norm_position='middle' is not one of post, pre"),
            ({"pad_token_id": 0}, "cannot be expressed: pad_token_id=0 is taken for 'no padding token'"),
            ({"eos_token_id": [1, 2]}, r"cannot be expressed: .*eos_token_id"),
            ({"vocab_sise": 9}, "cannot be expressed: unknown configuration field 'vocab_sise'"),
        ],
    )
    def test_a_configuration_that_is_not_ours(self, settings, message):
        with pytest.raises(UserError, match=message):
            own_config(settings)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            *(({"vocab_size": 29, name: 29}, f"^{name}=29 is not one of 29 tokens: pass --{name}$") for name in TOKENS),
            ({"vocab_size": 29, "eos_token_id": -1}, "^eos_token_id=-1 is not one of 29 tokens"),
            ({"vocab_size": 29, "pad_token_id": 9, **SMALL_SOURCE}, "^pad_token_id=9 is not one of 9 tokens"),
        ],
    )
    def test_tokens_that_do_not_exist(self, settings, message):
        with pytest.raises(UserError, match=message):
            own_config(settings)

    def test_the_last_token(self):
        ids = dict.fromkeys(TOKENS, 28)
        assert own_config({"vocab_size": 29, **ids}).pad_token_id == 28
        assert own_config({"vocab_size": 29, **SMALL_SOURCE, **ids, "pad_token_id": 8}).eos_token_id == 28
