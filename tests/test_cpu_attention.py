"""Attention over short sequences on CPUs against the formula in double precision, and where it is used."""

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, cpu_attention
from hf_vanilla_transformer.attention import scaled_dot_product_attention
from hf_vanilla_transformer.cpu_attention import short_attention, short_attention_applies

B, H, T, S, K = 3, 2, 5, 7, 4
MASKS = {
    "none": None,
    "of every query and key": torch.ones(T, S).tril(1).bool(),
    "padding": torch.arange(S).lt(torch.tensor([[7], [3], [1]]))[:, None, None].expand(B, 1, T, S),
    "causal": torch.ones(T, S).tril().bool()[None, None],
    "of every head": torch.rand(B, H, T, S, generator=torch.Generator().manual_seed(1)) > 0.3,
    "rows without keys": torch.arange(T).gt(2)[:, None].expand(B, 1, T, S),
    "nothing at all": torch.zeros(B, 1, T, S, dtype=torch.bool),
}


def inputs(dtype=torch.float32):
    """Queries, keys and values as the projections leave them: (B, T, H, K) in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, length, H, K) for length in (T, S, S)]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return leaves, [leaf.transpose(1, 2) for leaf in leaves]


def result_and_gradients(attend, dtype):
    leaves, states = inputs(dtype)
    context = attend(*states)
    weights = torch.linspace(-1, 1, context.numel()).view(context.shape).to(dtype)
    return context.detach(), *torch.autograd.grad((context * weights).sum(), leaves)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("vector", [S, S + 1], ids=["long rows", "short rows"])
@pytest.mark.parametrize("sentences", [2, B], ids=["two blocks", "one block"])
def test_against_the_formula(mask, dtype, tolerance, autocast, vector, sentences, monkeypatch):
    monkeypatch.setattr(cpu_attention, "VECTOR", vector)
    monkeypatch.setattr(cpu_attention, "BLOCK_BYTES", sentences * H * T * K * 4)
    expected = result_and_gradients(
        lambda *states: scaled_dot_product_attention(None, *(x.double() for x in states), mask, 0.5)[0], dtype
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = result_and_gradients(lambda *states: short_attention(*states, mask, 0.5, False), dtype)
    assert found[0].shape == (B, T, H, K)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_same_without_gradients(mask):
    _, states = inputs(torch.bfloat16)
    with torch.no_grad():
        alone = short_attention(*states, mask, 0.5, False)
    assert torch.equal(alone, short_attention(*states, mask, 0.5, False))
    assert not alone.requires_grad


def test_no_mask_may_mean_a_causal_one():
    _, states = inputs()
    expected = short_attention(*states, MASKS["causal"], 0.5, False)
    assert torch.equal(short_attention(*states, None, 0.5, True), expected)
    assert not torch.allclose(short_attention(*states, None, 0.5, False), expected)


def test_a_slice_of_a_larger_memory():
    """Beam search keeps keys and values in buffers with room for more."""
    _, (query, key, value) = inputs()
    room = [torch.cat([states, torch.full_like(states, torch.nan)], dim=2)[:, :, :S] for states in (key, value)]
    assert torch.equal(
        short_attention(query, *room, None, 0.5, False), short_attention(query, key, value, None, 0.5, False)
    )


def test_in_half_precision_only_the_weights_are_kept_in_more():
    _, states = inputs(torch.bfloat16)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        short_attention(*states, None, 0.5, False)
    assert [tensor.shape for tensor in kept if tensor.dtype == torch.float32] == [(B * H, T, S)]
    given = {state.untyped_storage().data_ptr() for state in states}
    assert {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.dtype == torch.bfloat16} == given


def test_second_derivatives_are_refused():
    leaves, states = inputs()
    context = short_attention(*states, None, 0.5, False)
    (gradient,) = torch.autograd.grad(context.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_where_it_applies(monkeypatch):
    _, (query, key, _) = inputs()
    assert short_attention_applies(query, key, MASKS["padding"], 0.0)
    assert not short_attention_applies(query, key, MASKS["padding"], 0.1)  # dropout of the weights
    assert not short_attention_applies(query, key, torch.zeros(T, S), 0.0)  # a mask of numbers
    assert not short_attention_applies(query[:, :, :1], key, None, 0.0)  # one query
    assert not short_attention_applies(query.double(), key.double(), None, 0.0)
    monkeypatch.setattr(cpu_attention, "MOST_KEYS", S - 1)
    assert not short_attention_applies(query, key, None, 0.0)


def test_transforms_of_functions_are_left_to_pytorch():
    _, (query, key, _) = inputs()
    assert not torch.func.vmap(lambda q: torch.tensor(short_attention_applies(q[None], key, None, 0.0)))(query).any()


def test_a_default_device_changes_nothing():
    _, states = inputs()
    with torch.device("meta"):
        found = short_attention(*states, None, 0.5, True)
    assert torch.equal(found, short_attention(*states, None, 0.5, True))


@pytest.mark.parametrize("labels", [[[5, 6, 7], [8, 9, -100]], [[5, 6, 7], [8, 9, 3]]], ids=["padded", "full"])
def test_a_training_step_of_the_model(labels, monkeypatch):
    """The whole model gives the same loss and gradients with it and with PyTorch's kernel."""
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test")).eval()
    batch = {"input_ids": torch.tensor([[9, 8, 7, 3], [6, 5, 3, 1]]), "labels": torch.tensor(labels)}
    calls, results = [], []
    original = cpu_attention._ShortAttention.apply
    monkeypatch.setattr(cpu_attention._ShortAttention, "apply", lambda *args: calls.append(1) or original(*args))
    for most in (128, 0):
        monkeypatch.setattr(cpu_attention, "MOST_KEYS", most)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert len(calls) == model.config.encoder_layers + 2 * model.config.decoder_layers
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
