"""Weights in the order of oneDNN's products, while text is translated on a CPU: nothing else changes."""

import platform

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import packed
from hf_vanilla_transformer.ensemble import Ensemble
from hf_vanilla_transformer.packed import packed_linear_layers
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import translate
from tiny_models import random_model

TEXT = ["the old man sleeps", "a dog sees the small cat", "the cat runs", "who sees a dog"]

needs_products = pytest.mark.skipif(
    torch.bfloat16 not in packed._faster_types(), reason="oneDNN has no bfloat16 for this CPU"
)
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no MKL")


def layer(bias=True, **options):
    torch.manual_seed(0)
    return nn.Linear(33, 77, bias=bias, **options).bfloat16().requires_grad_(False)


def states(*shape):
    return torch.randn(*shape, 33, generator=torch.Generator().manual_seed(1)).bfloat16()


def is_packed(module):
    return "forward" in vars(module)


@pytest.fixture
def products(monkeypatch):
    """The packed weights, once for each time that they were multiplied by."""
    used, original = [], torch.ops.mkldnn._linear_pointwise

    def product(input, weight, *arguments):
        used.append(weight)
        return original(input, weight, *arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    return used


@needs_products
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 5), (2, 3, 4)])
def test_the_product_is_that_of_the_layer(bias, shape, monkeypatch):
    linear = layer(bias)
    expected = linear(states(*shape))
    with packed_linear_layers(linear):
        assert torch.equal(linear(states(*shape)), expected)
        assert linear.forward.packed is None  # what is used once is not packed
        monkeypatch.setattr(nn.Linear, "forward", None)
        found = linear(states(*shape))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


@needs_products
def test_what_is_for_many_rows_is_packed_at_once(products):
    linear = layer()
    expected = linear(states(packed.MANY))
    with packed_linear_layers(linear):
        torch.testing.assert_close(linear(states(packed.MANY)), expected)
    assert len(products) == 1


@pytest.mark.skipif(platform.machine() != "x86_64" or not hasattr(torch.cpu, "get_capabilities"), reason="does not say")
def test_pytorch_says_whose_cpu_this_is():
    assert torch.cpu.get_capabilities()["cpu_name"]


@needs_mkl
def test_float32_too_on_cpus_of_amd(products, monkeypatch):
    monkeypatch.setattr(packed, "IS_AMD", True)
    linear, input = layer().float(), states(4).float()
    with packed_linear_layers(linear):
        for _ in range(2):
            torch.testing.assert_close(linear(input), nn.Linear.forward(linear, input))
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(input).dtype == torch.bfloat16
    assert len(products) == 1


@needs_products
def test_afterwards_all_is_as_before():
    linear = layer()
    for _ in range(2):
        with packed_linear_layers(linear):
            assert is_packed(linear)
        assert not is_packed(linear)
        linear.weight.data.neg_()  # as peft writes when it merges; the next block sees it
        with packed_linear_layers(linear):
            for _ in range(3):
                torch.testing.assert_close(linear(states(4)), nn.Linear.forward(linear, states(4)))
    with pytest.raises(KeyError), packed_linear_layers(linear):
        raise KeyError
    assert not is_packed(linear)


@needs_products
def test_hooks_and_blocks_inside_blocks():
    linear, seen = layer(), []
    linear.register_forward_hook(lambda *_: seen.append(1))
    with packed_linear_layers(linear):
        inner = linear.forward
        with packed_linear_layers(nn.Sequential(linear, linear)):
            assert linear.forward is inner
        assert linear.forward is inner
        linear(states(2))
        linear(states(2))
    assert seen == [1, 1]


@needs_products
def test_what_is_left_to_pytorch(products):
    class Other(nn.Linear):
        pass

    own = layer()
    own.forward = lambda input: input
    others = [layer().half(), layer(device="meta"), Other(33, 77).bfloat16()]
    with packed_linear_layers(nn.ModuleList([own, *others])):
        assert not any(is_packed(module) for module in others)
        for _ in range(2):
            assert torch.equal(own(states(2)), states(2))
            others[2](states(2))
    assert is_packed(own)
    assert not products


@needs_products
def test_conversions_and_graphs(monkeypatch):
    linear = layer()
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    with packed_linear_layers(linear):
        linear(states(2))
        with torch.autocast("cpu", torch.float16):
            assert linear(states(2)).dtype == torch.float16
        with pytest.raises(RuntimeError, match="dtype"):  # as the layer itself
            linear(states(2).float())
        compiled = torch.compile(lambda input: linear(input), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(states(2)), nn.Linear.forward(linear, states(2)))


def test_where_it_is_no_faster_nothing_happens(monkeypatch):
    monkeypatch.setattr(packed, "IS_AMD", False)
    with packed_linear_layers(model := random_model()):
        assert not any(map(is_packed, model.modules()))
    monkeypatch.setattr(packed, "_faster_types", set)
    with packed_linear_layers(model := random_model().bfloat16()):
        assert not any(map(is_packed, model.modules()))


def test_a_pytorch_without_onednn_has_not_even_the_operators(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    with packed_linear_layers(linear := layer()):
        assert not is_packed(linear)


@needs_products
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("members", [1, 2])
def test_translating(beams, members, products, monkeypatch):
    """All that is used more than once is packed, once for all batches."""
    tokenizer = joint_tokenizer(learn_backend(TEXT * 3, vocab_size=60))
    models = [random_model(vocab_size=len(tokenizer), d_model=32 * n).bfloat16().eval() for n in range(1, members + 1)]
    model = Ensemble(models) if members > 1 else models[0]
    model.generation_config.update(max_length=12)
    found = translate(model, tokenizer, TEXT, num_beams=beams, max_tokens_per_batch=10 * beams)
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    assert len({id(weight) for weight in products}) == len(linear)
    assert not any(map(is_packed, model.modules()))
    monkeypatch.setattr(packed, "_faster_types", set)
    assert translate(model, tokenizer, TEXT, num_beams=beams, max_tokens_per_batch=10 * beams) == found
