"""Weights in the order of oneDNN's products: during a search in bfloat16 on a CPU, and nothing else changes."""

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import packed
from hf_vanilla_transformer.ensemble import Ensemble
from hf_vanilla_transformer.packed import packed_linear_layers
from tiny_models import SOURCE, random_model

needs_products = pytest.mark.skipif(not packed._has_products(), reason="oneDNN has no bfloat16 for this CPU")


def layer(bias=True, **options):
    torch.manual_seed(0)
    return nn.Linear(33, 77, bias=bias, **options).bfloat16().requires_grad_(False)


def states(*shape):
    return torch.randn(*shape, 33, generator=torch.Generator().manual_seed(1)).bfloat16()


def is_packed(module):
    return "forward" in vars(module)


@pytest.fixture
def products(monkeypatch):
    """The layers that a packed product was asked of."""
    asked, original = [], packed._product

    def product(layer, *arguments):
        asked.append(layer)
        return original(layer, *arguments)

    monkeypatch.setattr(packed, "_product", product)
    return asked


@needs_products
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 5), (2, 3, 4)])
def test_the_product_is_that_of_the_layer(bias, shape, monkeypatch):
    linear = layer(bias)
    expected = linear(states(*shape))
    with packed_linear_layers(linear), monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", None)
        found = linear(states(*shape))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


@needs_products
def test_afterwards_all_is_as_before():
    linear = layer()
    for _ in range(2):
        with packed_linear_layers(linear):
            assert is_packed(linear)
        assert not is_packed(linear)
        linear.weight.data.neg_()  # as peft writes when it merges; the next block sees it
        with packed_linear_layers(linear):
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
    assert seen == [1]


@needs_products
def test_what_is_left_to_pytorch(products):
    class Other(nn.Linear):
        pass

    own = layer()
    own.forward = lambda input: input
    others = [layer().float(), layer(device="meta"), Other(33, 77).bfloat16()]
    with packed_linear_layers(nn.ModuleList([own, *others])):
        assert not any(is_packed(module) for module in others)
        assert torch.equal(own(states(2)), states(2))
    assert is_packed(own)
    assert not products


@needs_products
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_conversions_and_graphs(monkeypatch):
    linear = layer()
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    with packed_linear_layers(linear):
        with torch.autocast("cpu", torch.float16):
            assert linear(states(2)).dtype == torch.float16
        with pytest.raises(RuntimeError, match="dtype"):  # as the layer itself
            linear(states(2).float())
        compiled = torch.compile(lambda input: linear(input), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(states(2)), nn.Linear.forward(linear, states(2)))


def test_where_it_is_no_faster_nothing_happens(monkeypatch):
    with packed_linear_layers(model := random_model()):
        assert not any(map(is_packed, model.modules()))
    monkeypatch.setattr(packed, "_has_products", lambda: False)
    with packed_linear_layers(model := random_model().bfloat16()):
        assert not any(map(is_packed, model.modules()))


@needs_products
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("members", [1, 2])
def test_searching(options, members, products, monkeypatch):
    """By our searches, and by those of transformers for what ours cannot do."""
    options = {"do_sample": "top_k" in options, **options}
    model = random_model().bfloat16().eval()
    model = Ensemble([model, random_model(d_model=64).bfloat16().eval()]) if members == 2 else model
    found = model.generate(SOURCE, max_length=12, **options)
    decoders = [module for name, module in model.named_modules() if "decoder" in name and type(module) is nn.Linear]
    assert decoders
    assert {*decoders} <= {*products}
    assert not any(map(is_packed, model.modules()))
    monkeypatch.setattr(packed, "_has_products", lambda: False)
    assert model.generate(SOURCE, max_length=12, **options).tolist() == found.tolist()
