"""`inspection`: ablations do what they say, pictures come out, weights are those of the paper."""

import pytest
import torch

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.inspection import (
    cross_attention,
    plot_cross_attention,
    plot_learning_curve,
    plot_learning_rate,
    plot_positions,
    without,
)
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend


def logits(model, source, target):
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=target).logits


def test_without_cross_attention_the_source_is_not_seen(tiny_model):
    target = torch.tensor([[2, 5, 6, 7]])
    one, other = torch.tensor([[5, 6, 7, 3]]), torch.tensor([[9, 8, 3]])
    before = logits(tiny_model, one, target)
    assert not torch.allclose(before, logits(tiny_model, other, target))
    with without(tiny_model, "cross-attention"):
        assert torch.equal(logits(tiny_model, one, target), logits(tiny_model, other, target))
    assert torch.equal(logits(tiny_model, one, target), before)


def test_without_positions_the_order_of_the_source_is_not_seen(tiny_model):
    target = torch.tensor([[2, 5, 6]])
    one, other = torch.tensor([[5, 6, 7, 3]]), torch.tensor([[7, 3, 5, 6]])
    assert not torch.allclose(logits(tiny_model, one, target), logits(tiny_model, other, target), atol=1e-5)
    with without(tiny_model, "positions"):
        assert torch.allclose(logits(tiny_model, one, target), logits(tiny_model, other, target), atol=1e-5)


def test_without_something_else(tiny_model):
    with pytest.raises(UserError, match="cannot switch off 'legs'"), without(tiny_model, "legs"):
        pass


def test_cross_attention_has_a_row_for_each_written_token(tiny_model, monkeypatch):
    for name, value in {"num_return_sequences": 2, "num_beams": 3, "return_dict_in_generate": True}.items():
        monkeypatch.setattr(tiny_model.generation_config, name, value)
    tokenizer = joint_tokenizer(learn_backend(["a b c d e f"] * 3, vocab_size=99))
    backend = tiny_model.config._attn_implementation
    source, target, weights = cross_attention(tiny_model, tokenizer, "a b c")
    assert source[-1] == "</s>"
    batch = tokenizer(["a b c"], return_tensors="pt")
    written = tiny_model.generate(**batch, num_beams=1, num_return_sequences=1, return_dict_in_generate=False)
    assert target == tokenizer.convert_ids_to_tokens(written[0, 1:].tolist())
    config = tiny_model.config
    assert weights.shape == (config.decoder_layers, config.decoder_attention_heads, len(target), len(source))
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5)
    assert tiny_model.config._attn_implementation == backend
    tiny_model.set_attn_implementation("eager")
    for step in range(len(target)):
        seen = written[:, : step + 1]  # when token `step` was written
        output = tiny_model(**batch, decoder_input_ids=seen, output_attentions=True)
        for layer, expected in zip(weights, output.cross_attentions, strict=True):
            torch.testing.assert_close(layer[:, step], expected[0, :, -1])


def test_pictures(tmp_path, tiny_model):
    history = [
        {"step": 1, "loss": 5.0, "learning_rate": 0.1},
        {"step": 2, "loss": 4.0, "learning_rate": 0.2},
        {"step": 2, "eval_loss": 4.5, "eval_bleu": 3.0},
    ]
    plot_learning_curve(history, tmp_path / "curve.png")
    plot_learning_rate(history, tmp_path / "rate.png")
    plot_positions(tmp_path / "positions.png")
    plot_cross_attention(["a", "b"], ["x", "y", "z"], torch.rand(2, 4, 3, 2), tmp_path / "attention.png")
    for picture in tmp_path.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.glob("*.png"))) == 4


def test_pictures_say_what_they_need(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pictures need matplotlib: pip install"):
        plot_positions(tmp_path / "positions.png")
