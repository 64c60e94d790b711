"""Weights in the order of oneDNN's products: for bfloat16 on CPUs, and nothing else changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, packed
from hf_vanilla_transformer.packed import PackedLinear, pack_linear_layers
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import load_model, translate
from tiny_models import PAD, SOURCE, TARGET, random_model

TEXT = ["the old man sleeps", "a dog sees the small cat", "the cat runs", "who sees a dog"]
needs_products = pytest.mark.skipif(not packed._has_products(), reason="oneDNN has no bfloat16 for this CPU")


def layer(bias=True):
    torch.manual_seed(0)
    return nn.Linear(33, 77, bias=bias).bfloat16()


def states(*shape):
    return torch.randn(*shape, 33, generator=torch.Generator().manual_seed(1)).bfloat16()


@needs_products
@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 5), (2, 3, 4)])
def test_the_product_is_that_of_the_layer(bias, shape):
    plain = layer(bias)
    found = PackedLinear(plain)(states(*shape))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, plain(states(*shape)))


@needs_products
@torch.no_grad()
def test_it_is_packed_once_and_anew_after_a_change():
    plain = layer()
    ours = PackedLinear(plain)
    ours(states(4))
    first = ours._packed
    ours(states(4))
    assert first.is_mkldnn
    assert ours._packed is first
    plain.weight.neg_()  # the same parameter
    torch.testing.assert_close(ours(states(4)), plain(states(4)))
    ours.weight = nn.Parameter(torch.zeros_like(plain.weight))
    assert torch.equal(ours(states(4)), plain.bias.expand(4, -1))


@needs_products
@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies(copied):
    ours = PackedLinear(layer())
    expected = ours(states(4))
    other = copied(ours)
    assert other._packed is None
    assert torch.equal(other(states(4)), expected)


@needs_products
@torch.inference_mode()
def test_weights_made_in_inference_mode():
    plain = layer()
    torch.testing.assert_close(PackedLinear(plain)(states(4)), plain(states(4)))


def test_gradients_and_other_types_are_left_to_pytorch():
    plain = layer()
    ours = PackedLinear(plain)
    ours(states(4)).sum().backward()
    assert plain.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(ours.float()(states(4).float()), plain(states(4).float()))
    assert ours._packed is None


@needs_products
def test_a_model_computes_the_same_and_saves_the_same(tmp_path):
    plain, ours = random_model().bfloat16(), pack_linear_layers(random_model().bfloat16())
    linear = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    assert all(type(ours.get_submodule(name)) is PackedLinear for name in linear)
    assert ours.lm_head.weight is ours.model.decoder.embed_tokens.weight
    with torch.no_grad():
        expected, found = (model(SOURCE, SOURCE.ne(PAD), TARGET).logits for model in (plain, ours))
    torch.testing.assert_close(found, expected)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    ours.save_pretrained(tmp_path)
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in plain.state_dict().items())


def test_where_it_is_no_faster_nothing_happens(monkeypatch):
    assert not any(isinstance(module, PackedLinear) for module in pack_linear_layers(random_model()).modules())
    monkeypatch.setattr(packed, "_has_products", lambda: False)
    model = pack_linear_layers(random_model().bfloat16())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@needs_products
def test_translating(tmp_path):
    tokenizer = joint_tokenizer(learn_backend(TEXT * 3, vocab_size=60))
    model = random_model(vocab_size=len(tokenizer))
    model.generation_config.update(max_length=20)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_model(str(tmp_path), device="cpu", dtype="bfloat16")
    assert type(loaded.lm_head) is PackedLinear
    for beams in (1, 3):
        expected = translate(model.bfloat16(), tokenizer, TEXT, num_beams=beams)
        assert translate(loaded, tokenizer, TEXT, num_beams=beams) == expected
