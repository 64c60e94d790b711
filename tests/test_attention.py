"""Attention against the formula in numpy, and its contracts: masks, empty rows, beams, cache."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_vanilla_transformer.attention import MultiHeadAttention, scaled_dot_product_attention

B, H, T, S, K, D = 2, 3, 4, 5, 6, 8
BACKENDS = [scaled_dot_product_attention, sdpa_attention_forward]


def softmax(scores):
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def formula(query, key, value, allowed=None):
    """Equation 1 in numpy, one query at a time over the keys that it may see."""
    context = np.zeros(query.shape)
    weights = np.zeros((*query.shape[:-1], key.shape[-2]))
    for b, h, t in np.ndindex(query.shape[:-1]):
        keys = np.arange(key.shape[-2]) if allowed is None else np.flatnonzero(allowed[b, 0, t])
        if len(keys):
            weights[b, h, t, keys] = softmax(key[b, h, keys] @ query[b, h, t] / np.sqrt(query.shape[-1]))
            context[b, h, t] = weights[b, h, t, keys] @ value[b, h, keys]
    return context.transpose(0, 2, 1, 3), weights


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, length, K, generator=generator) for length in (T, S, S)]


@pytest.fixture
def allowed():
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(B, 1, T, S, generator=generator) < 0.6
    allowed[0, 0, 1] = False
    return allowed


def layer(**overrides):
    torch.manual_seed(2)
    arguments = {"d_model": D, "num_heads": H, "head_dim": K, "dropout": 0.0, "bias": True, **overrides}
    return MultiHeadAttention(**arguments).eval()


class TestScaledDotProductAttention:
    def test_formula(self, qkv):
        context, weights = scaled_dot_product_attention(None, *qkv, mask=None, scaling=K**-0.5)
        expected_context, expected_weights = formula(*(x.numpy() for x in qkv))
        np.testing.assert_allclose(context, expected_context, atol=1e-6)
        np.testing.assert_allclose(weights, expected_weights, atol=1e-6)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_boolean_mask(self, qkv, allowed, backend):
        module = layer()
        context, weights = backend(module, *qkv, allowed, dropout=0.0, scaling=K**-0.5)
        expected_context, expected_weights = formula(*(x.numpy() for x in qkv), allowed.numpy())
        np.testing.assert_allclose(context, expected_context, atol=1e-6)
        if weights is not None:
            np.testing.assert_allclose(weights, expected_weights, atol=1e-6)

    @pytest.mark.parametrize("forbidden_value", [torch.finfo(torch.float32).min, -torch.inf])
    def test_additive_mask_means_the_same(self, qkv, allowed, forbidden_value):
        additive = torch.zeros(allowed.shape).masked_fill(~allowed, forbidden_value)
        boolean = scaled_dot_product_attention(None, *qkv, allowed, K**-0.5)
        for ours, expected in zip(scaled_dot_product_attention(None, *qkv, additive, K**-0.5), boolean, strict=True):
            torch.testing.assert_close(ours, expected, atol=0, rtol=0)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_other_numbers_of_an_additive_mask_are_added(self, qkv, allowed, backend):
        """Such as a penalty for distance."""
        bias = -0.5 * (torch.arange(T)[:, None] - torch.arange(S)).abs().float()
        query, key, value = qkv
        expected = (query @ key.transpose(-2, -1) * K**-0.5 + bias).masked_fill(~allowed, -torch.inf).softmax(-1)
        expected = expected.nan_to_num(0.0) @ value
        additive = bias.masked_fill(~allowed, torch.finfo(torch.float32).min)
        context, _ = backend(layer(), *qkv, additive, dropout=0.0, scaling=K**-0.5)
        some = allowed.any(-1).expand(B, H, T)  # fused kernels take a row of the smallest number for a row of equals
        torch.testing.assert_close(context.transpose(1, 2)[some], expected[some])

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_row_without_keys_is_zero_and_has_finite_gradients(self, qkv, backend):
        allowed = torch.ones(B, 1, T, S, dtype=torch.bool)
        allowed[0, 0, 1] = allowed[1] = False
        inputs = [x.requires_grad_() for x in qkv]
        context, _ = backend(layer(), *inputs, allowed, dropout=0.0, scaling=K**-0.5)
        assert context[0, 1].eq(0).all()
        assert context[1].eq(0).all()
        assert context[0, 0].ne(0).all()
        context.square().sum().backward()
        for x in inputs:
            assert x.grad.isfinite().all()
            assert x.grad[1].eq(0).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_with_an_empty_row(self, qkv, allowed, dtype):
        half = [x.to(dtype) for x in qkv]
        context, weights = scaled_dot_product_attention(None, *half, allowed, K**-0.5)
        assert context.dtype == weights.dtype == dtype
        expected, _ = formula(*(x.numpy() for x in qkv), allowed.numpy())
        np.testing.assert_allclose(context.float(), expected, atol=0.05)

    def test_dropout_acts_on_the_weights(self, qkv):
        query, key, _ = qkv
        value = torch.ones(B, H, S, K)
        torch.manual_seed(0)
        context, weights = scaled_dot_product_attention(None, query, key, value, None, K**-0.5, dropout=0.5)
        assert not torch.allclose(context, torch.ones(()))
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T))


class TestMultiHeadAttention:
    def heads(self, projection, states):
        """(B, T, D) -> (B, H, T, K) by numpy."""
        projected = states.numpy() @ projection.weight.detach().numpy().T + projection.bias.detach().numpy()
        return projected.reshape(*states.shape[:2], H, K).transpose(0, 2, 1, 3)

    @torch.no_grad()
    def test_formula(self):
        """A head size of its own (H * K != D), queries and keys from different places, a mask."""
        attention, queries, memory = layer(), torch.randn(B, T, D), torch.randn(B, S, D)
        mask = torch.rand(B, 1, T, S) < 0.7
        output, weights = attention(queries, memory, mask)
        context, expected_weights = formula(
            self.heads(attention.q_proj, queries),
            self.heads(attention.k_proj, memory),
            self.heads(attention.v_proj, memory),
            mask.numpy(),
        )
        expected = context.reshape(B, T, H * K) @ attention.out_proj.weight.numpy().T + attention.out_proj.bias.numpy()
        np.testing.assert_allclose(output, expected, atol=1e-5)
        np.testing.assert_allclose(weights, expected_weights, atol=1e-6)

    def test_torch_multihead_attention(self):
        attention = layer(num_heads=2, head_dim=D // 2)
        reference = torch.nn.MultiheadAttention(D, 2, batch_first=True)
        with torch.no_grad():
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            reference.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
            reference.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
            reference.out_proj.load_state_dict(attention.out_proj.state_dict())
        queries, memory = torch.randn(B, T, D), torch.randn(B, S, D)
        expected = reference(queries, memory, memory, average_attn_weights=False)
        for ours, theirs in zip(attention(queries, memory), expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("bias", [True, False])
    def test_bias(self, bias):
        assert {name.split(".")[1] for name, _ in layer(bias=bias).named_parameters()} == (
            {"weight", "bias"} if bias else {"weight"}
        )

    def test_dropout_only_in_training(self):
        attention, states = layer(dropout=0.5), torch.randn(B, T, D)
        torch.testing.assert_close(attention(states)[0], attention(states)[0], atol=0, rtol=0)
        attention.train()
        assert not torch.allclose(attention(states)[0], attention(states)[0])

    @pytest.mark.parametrize("of_itself", [True, False])
    def test_autocast_keeps_what_is_projected_once(self, of_itself):
        attention, states, memory = layer(), torch.randn(B, T, D), None if of_itself else torch.randn(B, S, D)
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, keep):
            output, _ = attention(states, memory)
        assert output.dtype == torch.bfloat16
        sizes = [(tensor.numel(), tensor.dtype) for tensor in kept.values()]
        for given in [states] if of_itself else [states, memory]:
            assert sizes.count((given.numel(), torch.bfloat16)) == 1
            assert (given.numel(), torch.float32) not in sizes

    def test_autocast_leaves_double_precision_alone(self):
        attention, states = layer().double(), torch.randn(B, T, D, dtype=torch.float64)
        expected, _ = attention(states)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(attention(states)[0], expected, rtol=0, atol=0)

    def test_without_autocast_nothing_is_cast(self):
        """Not even to the same type, which a traced graph would keep; and the meta device has no autocast."""
        for states in (torch.randn(B, T, D), torch.randn(B, T, D, device="meta")):
            assert MultiHeadAttention._cast(states) is states
        assert layer().to("meta")(states)[0].shape == (B, T, D)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("length", [1, T])
    def test_beams_share_their_memory(self, backend, length):
        """Rows 0-2 are beams of sentence 0, rows 3-5 of sentence 1; one memory per sentence = three copies of it."""
        beams, attention = 3, layer()
        queries, memory = torch.randn(B * beams, length, D), torch.randn(B, S, D)
        mask = torch.ones(B, 1, 1, S, dtype=torch.bool)
        mask[1, ..., 3:] = False
        output, weights = attention(queries, memory, mask, attend=backend)
        repeated = [x.repeat_interleave(beams, dim=0) for x in (memory, mask)]
        expected, expected_weights = attention(queries, *repeated, attend=backend)
        torch.testing.assert_close(output, expected)
        if weights is not None:
            assert weights.shape == (B * beams, H, length, S)
            torch.testing.assert_close(weights, expected_weights)

    @pytest.mark.parametrize("step", [1, 2])
    def test_cached_self_attention(self, step):
        attention, states = layer(layer_idx=0), torch.randn(B, T, D)
        causal = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
        expected, _ = attention(states, mask=causal)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        outputs = [
            attention(states[:, t : t + step], None, causal[..., t : t + step, : t + step], cache)[0]
            for t in range(0, T, step)
        ]
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected)
        assert cache.self_attention_cache.layers[0].keys.shape == (B, H, T, K)

    def test_cached_cross_attention_projects_the_memory_once(self):
        attention, states, memory = layer(layer_idx=0), torch.randn(B, T, D), torch.randn(B, S, D)
        expected, _ = attention(states, memory)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        projected = []
        attention.k_proj.register_forward_hook(lambda *_: projected.append(1))
        outputs = [attention(states[:, t : t + 1], memory, None, cache)[0] for t in range(T)]
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected)
        assert len(projected) == 1
        assert cache.cross_attention_cache.layers[0].keys.shape == (B, H, S, K)
