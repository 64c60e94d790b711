"""Embeddings and positions against the formulas of sections 3.4 and 3.5, and through saving and loading."""

import math

import numpy as np
import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerModel
from hf_vanilla_transformer.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding, sinusoid_table


def formula(positions, d_model):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model)), entry by entry."""
    table = np.empty((positions, d_model))
    for position, column in np.ndindex(positions, d_model):
        angle = position / 10000 ** (2 * (column // 2) / d_model)
        table[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table


@pytest.fixture
def deterministic():
    """In this mode PyTorch fills empty memory with NaN, so that nothing uninitialised passes for a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_device_without_float64_gets_the_table_from_the_cpu(monkeypatch):
    """Apple's: here only its name can be asked for."""
    made, moved, arange = [], [], torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda *args, **options: made.append(options["device"]) or arange(*args, **options)
    )
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append(device) or self)
    torch.testing.assert_close(sinusoid_table(5, 4, torch.device("mps:0")), sinusoid_table(5, 4))
    assert (set(made), moved) == ({"cpu", None}, [torch.device("mps:0"), None])


class TestTokenEmbedding:
    @pytest.mark.parametrize("scale", [1.0, 16**0.5])
    def test_scale(self, scale):
        embedding = TokenEmbedding(7, 16, scale)
        ids = torch.tensor([[1, 6, 0]])
        torch.testing.assert_close(embedding(ids), embedding.weight[ids] * scale)

    @pytest.mark.parametrize(("scale_embedding", "scale"), [(True, 32**0.5), (False, 1.0)])
    def test_scale_of_the_model(self, scale_embedding, scale):
        config = VanillaTransformerConfig.preset("test", vocab_size=9, scale_embedding=scale_embedding)
        model = VanillaTransformerModel(config)
        assert model.encoder.embed_tokens.embed_scale == model.decoder.embed_tokens.embed_scale == scale


class TestSinusoids:
    @pytest.mark.parametrize("d_model", [2, 7, 512])
    def test_formula(self, d_model):
        table = sinusoid_table(200, d_model)
        assert table.dtype == torch.float32
        np.testing.assert_allclose(table, formula(200, d_model), atol=1e-7)

    def test_far_positions_are_exact(self):
        np.testing.assert_allclose(sinusoid_table(20000, 8)[-1], formula(20000, 8)[-1], atol=1e-7)

    def test_grows_past_its_length(self):
        positions = SinusoidalPositions(10, 8)
        positions(torch.arange(3), 3)
        np.testing.assert_allclose(positions(torch.arange(25), 25), formula(25, 8), atol=1e-7)

    def test_batch_of_positions(self):
        ids = torch.tensor([[0, 0, 1], [0, 1, 2]])
        np.testing.assert_allclose(SinusoidalPositions(10, 8)(ids, 3), formula(3, 8)[ids], atol=1e-7)

    def test_nothing_is_stored(self):
        positions = SinusoidalPositions(10, 8)
        positions(torch.arange(3), 3)
        assert not positions.state_dict()
        assert not list(positions.buffers())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_survives_saving_and_loading(self, tmp_path, deterministic, dtype):
        config = VanillaTransformerConfig.preset("test", vocab_size=9)
        VanillaTransformerModel(config).to(dtype).save_pretrained(tmp_path)
        model = VanillaTransformerModel.from_pretrained(tmp_path)
        assert model.dtype == dtype
        for stack in (model.encoder, model.decoder):
            table = stack.embed_positions(torch.arange(64), 64)
            assert table.dtype == torch.float32
            np.testing.assert_allclose(table, formula(64, 32), atol=1e-7)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_survives_a_cast_after_use(self, dtype):
        model = VanillaTransformerModel(VanillaTransformerConfig.preset("test", vocab_size=9))
        model.encoder(torch.tensor([[4, 5]]))
        model = model.to(dtype)
        np.testing.assert_allclose(model.encoder.embed_positions(torch.arange(64), 64), formula(64, 32), atol=1e-7)

    def test_the_model_goes_on_past_max_position_embeddings(self):
        config = VanillaTransformerConfig.preset("test", vocab_size=9, max_position_embeddings=4)
        long = torch.full((1, 6), 5)
        output = VanillaTransformerModel(config).eval()(long, decoder_input_ids=long).last_hidden_state
        assert output.isfinite().all()


class TestLearnedPositions:
    def test_lookup(self):
        positions = LearnedPositions(10, 8)
        torch.testing.assert_close(positions(torch.arange(10), 10), positions.weight)

    def test_past_the_end(self):
        config = VanillaTransformerConfig.preset(
            "test", vocab_size=9, max_position_embeddings=4, position_embedding_type="learned"
        )
        model = VanillaTransformerModel(config).eval()
        fits, too_long = torch.full((1, 4), 5), torch.full((1, 5), 5)
        assert model(fits, decoder_input_ids=fits).last_hidden_state.isfinite().all()
        message = r"a sequence of 5 tokens does not fit: the model learned 4 positions \(max_position_embeddings\)"
        with pytest.raises(ValueError, match=message):
            model(too_long, decoder_input_ids=fits)
        with pytest.raises(ValueError, match=message):
            model(fits, decoder_input_ids=too_long)

    def test_saved_and_loaded(self, tmp_path, deterministic):
        config = VanillaTransformerConfig.preset("test", vocab_size=9, position_embedding_type="learned")
        model = VanillaTransformerModel(config)
        model.save_pretrained(tmp_path)
        loaded = VanillaTransformerModel.from_pretrained(tmp_path)
        for stack in ("encoder", "decoder"):
            ours, theirs = (getattr(m, stack).embed_positions.weight for m in (loaded, model))
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
        assert not torch.equal(model.encoder.embed_positions.weight, model.decoder.embed_positions.weight)

    def test_they_matter(self):
        """Attention without positions cannot tell the order of its input; with them it can."""
        config = VanillaTransformerConfig.preset("test", vocab_size=9, position_embedding_type="learned")
        encoder = VanillaTransformerModel(config).eval().encoder
        there, back = (encoder(torch.tensor([ids])).last_hidden_state for ids in ([4, 5, 6], [6, 5, 4]))
        assert not torch.allclose(there, back.flip(1), atol=1e-3)
