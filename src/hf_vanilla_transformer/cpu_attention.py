"""Attention over short sequences on CPUs: the formula as batched matrix products.

PyTorch's fused kernel goes through queries and keys in blocks of a size that pays for long sequences; for sentences the
plain formula is faster. What the formula keeps in memory, the attention weights, is small for sentences, and the limit
below sees to it.

Shapes: B batch, T target (query) length, S source (key) length, H heads, K head size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_BYTES = 2**19  # of queries in float32 that are gone through at once, which a CPU's caches hold
MOST_KEYS = 128  # above, the blocks of the fused kernel pay
VECTOR = 16  # numbers that AVX-512 takes at once: PyTorch's softmax goes through shorter rows one by one
HAS_AMX = getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)  # older PyTorch does not say


def widens(states: Tensor, queries: int) -> bool:
    """Whether `sdpa` is to compute in float32 what comes in bfloat16.

    On CPUs that is faster, without AMX several times; for a single query of each sentence with AMX it mostly is not.
    """
    return states.device.type == "cpu" and states.dtype == torch.bfloat16 and not (HAS_AMX and queries == 1)


def short_attention_applies(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether `short_attention` can compute this, and should."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.shape[2] > 1  # one query of each sentence is a product with a vector
        and key.shape[2] <= MOST_KEYS
        and (mask is None or mask.dtype == torch.bool)
        and not dropout
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()  # for which autograd functions need more than we give
    )


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, is_causal: bool
) -> Tensor:
    """Equation 1, softmax(Q K^T / sqrt(d_k)) V, in float32 whatever the type of the arguments.

    Args:
        query: (B, H, T, K).
        key, value: (B, H, S, K).
        mask: booleans broadcastable to (B, H, T, S), True = may attend. A query that may attend to nothing gets zeros.
        scaling: 1 / sqrt(d_k).
        is_causal: what no mask means: that the first query may see the first key only, the second one more, and so on.

    Returns:
        the context, (B, T, H, K), of the query's type.
    """
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if torch.is_grad_enabled():
        return _ShortAttention.apply(query, key, value, mask, scaling)
    return _attend(query, key, value, mask, scaling)[0]


class _ShortAttention(torch.autograd.Function):
    """With P = softmax(s Q K^T) and C = P V: dV = P^T dC, dP = dC V^T, dS = P (dP - sum(P dP)), dQ = s dS K,
    dK = s dS^T Q.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        context, weights = _attend(query, key, value, mask, scaling)
        ctx.save_for_backward(query, key, value, *weights)
        ctx.scaling = scaling
        return context

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *weights = ctx.saved_tensors
        states, gradient = (query, key, value), gradient.transpose(1, 2)
        gradients = [tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2) for tensor in states]
        for rows, p in zip(_blocks(gradient), weights, strict=True):
            q, k, v, of_context = (_matrices(tensor[rows]) for tensor in (*states, gradient))
            of_v = p.mT @ of_context
            of_scores = _softmax_backward(of_context @ v.mT, p)
            of_q, of_k = _product(of_scores, k, ctx.scaling), _product(of_scores.mT, q, ctx.scaling)
            for total, part in zip(gradients, (of_q, of_k, of_v), strict=True):
                total[rows] = part.view(total[rows].shape)
        return *gradients, None, None


@torch.autocast("cpu", enabled=False)
def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, list[Tensor]]:
    """The context, (B, T, H, K), and the weights of each block of sentences, (rows * H, T, S), in float32."""
    context = query.new_empty(query.transpose(1, 2).shape)
    weights = []
    if mask is not None:
        # compared into floating point: PyTorch goes through booleans one by one
        allowed = torch.eq(mask, True, out=query.new_empty(mask.shape, dtype=torch.float32))
        forbidden = (1 - allowed).mul_(torch.finfo(torch.float32).min)
        each = (len(query), *(1,) * (3 - mask.dim()), *mask.shape[-3:])
        allowed, forbidden = allowed.expand(each), forbidden.expand(each)
    for rows in _blocks(query):
        q, k, v = (_matrices(states[rows]) for states in (query, key, value))
        scores = _product(q, k.mT, scaling).unflatten(0, (-1, query.shape[1]))  # (rows, H, T, S)
        if mask is not None:
            scores.add_(forbidden[rows])
        p = _softmax(scores)
        if mask is not None:
            p.mul_(allowed[rows])  # zeros for a query that may attend to nothing
        p = p.flatten(0, 1)
        context[rows] = (p @ v).unflatten(0, (-1, query.shape[1])).transpose(1, 2)
        weights.append(p)
    return context, weights


def _blocks(states: Tensor) -> Iterator[slice]:
    """The sentences of (B, H, T, K), so many at once that in float32 a CPU's caches hold them."""
    rows = max(1, BLOCK_BYTES // (4 * states.shape[1:].numel()))
    return (slice(start, start + rows) for start in range(0, len(states), rows))


def _softmax(scores: Tensor) -> Tensor:
    """Over the last dimension. The scores are lost."""
    if scores.shape[-1] >= VECTOR:
        return scores.softmax(dim=-1)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True))


def _softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the scores from that of the weights, which is lost."""
    if weights.shape[-1] >= VECTOR:
        return torch._softmax_backward_data(gradient, weights, -1, weights.dtype)
    return gradient.sub_((gradient * weights).sum(dim=-1, keepdim=True)).mul_(weights)


def _product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """scaling * left @ right; the library scales within the product."""
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scaling)


def _matrices(states: Tensor) -> Tensor:
    """(B, H, T, K) -> (B * H, T, K) in float32, copied only if it must be."""
    if states.dtype != torch.float32:
        states = states.to(torch.float32, memory_format=torch.contiguous_format)
    return states.flatten(0, 1)
