"""`--dtype int8`: every linear layer in 8 bits, near float32, on CPUs, by PyTorch's own layers."""

import sys

import pytest
import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.int8 import quantize_linear_layers
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import load_ensemble, load_model, translate
from tiny_models import BOS, EOS, PAD, SOURCE, TARGET, V, random_model

TEXT = ["the old man sleeps", "a dog sees the small cat", "the cat runs", "who sees a dog"]


@pytest.fixture
def folder(tmp_path):
    tokenizer = joint_tokenizer(learn_backend(TEXT * 3, vocab_size=60))
    model = random_model(vocab_size=len(tokenizer))
    model.generation_config.update(num_beams=3, early_stopping=True, max_length=20)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("overrides", [{}, {"lm_head_bias": True, "attention_bias": False}], ids=["biases", "none"])
def test_weights_are_off_by_half_a_step_of_their_row(overrides):
    model, quantized = random_model(**overrides), quantize_linear_layers(random_model(**overrides))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert "lm_head" in linear
    for name in linear:
        weight, found = model.get_submodule(name).weight, quantized.get_submodule(name).weight()
        assert found.dtype == torch.qint8, name
        half_step = weight.abs().amax(dim=1, keepdim=True) / 127.5 / 2
        assert ((found.dequantize() - weight).abs() <= half_step * 1.01).all(), name
    assert torch.equal(quantized.model.encoder.embed_tokens.weight, model.model.encoder.embed_tokens.weight)


@torch.no_grad()
def test_logits_are_near_float32_and_yet_not_the_same():
    exact = random_model()(SOURCE, SOURCE.ne(PAD), TARGET).logits
    found = quantize_linear_layers(random_model())(SOURCE, SOURCE.ne(PAD), TARGET).logits
    error = (found - exact).std() / exact.std()
    assert 0 < error < 0.05


def test_the_search_of_a_loaded_model_is_that_of_its_own_logits(folder):
    """The fast search, with its cache, against transformers' loop over forward passes."""
    model, tokenizer = load_model(folder, device="cpu", dtype="int8")
    batch = tokenizer(TEXT, return_tensors="pt", padding=True)
    plain = model.generate(**batch, use_cache=False, output_scores=True, return_dict_in_generate=True).sequences
    texts = tokenizer.batch_decode(plain, skip_special_tokens=True)
    same = sum(a == b for a, b in zip(translate(model, tokenizer, TEXT), texts, strict=True))
    assert same >= len(TEXT) - 1  # one scale for a whole batch: what is beside a word moves its last bits


def test_models_of_transformers_and_ensembles(folder):
    config = MarianConfig(
        vocab_size=V, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64
    )
    config.update({"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": BOS})
    marian = quantize_linear_layers(MarianMTModel(config).eval())
    assert marian.generate(SOURCE, max_length=8, num_beams=2).shape[0] == len(SOURCE)
    model, tokenizer = load_ensemble([folder, folder], device="cpu", dtype="int8")
    assert translate(model, tokenizer, TEXT) == translate(*load_model(folder, device="cpu", dtype="int8"), TEXT)


def test_what_8_bits_cannot_do(folder, tmp_path, monkeypatch):
    model, _ = load_model(folder, device="cpu", dtype="int8")
    with pytest.raises(UserError, match="a model with 8-bit weights cannot be saved"):
        model.save_pretrained(tmp_path / "new")
    with pytest.raises(UserError, match=r"made from float32 on a CPU, not from torch\.bfloat16 on cpu"):
        quantize_linear_layers(random_model().bfloat16())
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)  # as if it were gone
    with pytest.raises(UserError, match="this PyTorch has no 8-bit layers for CPUs any more: take bfloat16"):
        quantize_linear_layers(random_model())
