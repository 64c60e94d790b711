"""Dropout on CPUs against what it is by definition."""

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, dropout
from hf_vanilla_transformer.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_and_scale(p, dtype):
    torch.manual_seed(0)
    values = torch.full((1001, 333), 2.0, dtype=dtype)
    result = Dropout(p)(values)
    assert result.dtype == dtype
    kept = result != 0
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.003)
    assert result[kept].unique().tolist() == [(torch.tensor(2.0, dtype=dtype) * (1 / (1 - p))).item()]


def test_elements_are_dropped_independently():
    """Neighbours share the bits of one drawn number: each of the four places must be as likely, whatever the others."""
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(400_000)) != 0).view(-1, 4)
    patterns = (kept * torch.tensor([1, 2, 4, 8])).sum(dim=1).bincount(minlength=16) / len(kept)
    torch.testing.assert_close(patterns, torch.full((16,), 1 / 16), atol=0.003, rtol=0)


def test_the_gradient_has_the_same_mask():
    values = torch.randn(7, 13).requires_grad_()
    result = Dropout(0.4)(values)
    result.backward(torch.full_like(values, 3.0))
    torch.testing.assert_close(values.grad, torch.where(result != 0, 3.0 / 0.6, 0.0))
    torch.testing.assert_close(result, values.detach() * values.grad / 3)


def test_the_seed_decides():
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(Dropout(0.5)(torch.ones(50)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_blocks_change_nothing(monkeypatch):
    results = []
    for block in (8, 64):
        monkeypatch.setattr(dropout, "BLOCK", block)
        torch.manual_seed(0)
        results.append(Dropout(0.5)(torch.ones(3, 10)))
    assert torch.equal(*results)
    assert 0 < results[0].count_nonzero() < 30


@pytest.mark.parametrize("dropout", [Dropout(0.0), Dropout(0.5).eval()])
def test_nothing_is_dropped(dropout):
    values = torch.randn(5, 5)
    assert dropout(values) is values or torch.equal(dropout(values), values)


@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5, 7)])
def test_any_shape_and_memory_format(shape):
    values = torch.ones(*shape, 2).transpose(0, -1)
    assert Dropout(0.5)(values).shape == values.shape


def test_every_dropout_of_the_model_is_this_one():
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test"))
    found = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert len(found) > 10
    assert all(type(module) is Dropout for module in found)
