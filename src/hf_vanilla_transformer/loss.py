"""Label-smoothed cross-entropy over a large vocabulary: section 5.4 of "Attention Is All You Need".

The smoothed target distribution is (1 - eps) on the reference token plus eps / V on every token of the vocabulary
(Szegedy et al. 2016, the paper's reference 36; the same as `torch.nn.CrossEntropyLoss(label_smoothing=eps)`).

Shapes: N tokens, D d_model, V vocabulary, C tokens of one chunk.
"""

import torch
from torch import Tensor, nn

IGNORED = -100  # the label that says "not a target token", as everywhere in PyTorch and transformers
CHUNK_ELEMENTS = 2**23  # logits held at once: 32 MiB of float32


def label_smoothed_cross_entropy(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float, bias: Tensor | None = None
) -> Tensor:
    """Sum over the target tokens of the smoothed cross-entropy of softmax(hidden_states weight^T + bias).

    The logits are made, used and differentiated chunk by chunk, and only for real target tokens: the full (N, V)
    matrix never exists, in the forward pass or in the backward pass. Under `torch.compile` the plain formula is
    used, whose shapes do not depend on the data.

    Args:
        hidden_states: (..., D), what the output projection would receive.
        weight: (V, D), the output projection.
        labels: (...), token ids; `IGNORED` is left out.
        label_smoothing: eps.
        bias: (V), of the output projection, or None.

    Returns:
        a scalar, float32; divide it by the number of target tokens.
    """
    hidden_states = hidden_states.flatten(0, -2)
    labels = labels.flatten()
    if torch.compiler.is_compiling():
        logits = nn.functional.linear(hidden_states, weight, bias).float()
        return nn.functional.cross_entropy(
            logits, labels, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum"
        )
    is_target = labels != IGNORED
    return _ChunkedCrossEntropy.apply(hidden_states[is_target], weight, bias, labels[is_target], label_smoothing)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; the backward pass only scales them.

    With p = softmax(logits) and the smoothed target q: loss = -sum q log p, d loss / d logits = p - q.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, labels, label_smoothing) -> Tensor:
        dtype = hidden_states.dtype
        device_type = hidden_states.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        needs_hidden_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        hidden, projection = hidden_states.to(dtype), weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if needs_hidden_grad else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs_bias_grad else None
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        with torch.autocast(device_type, enabled=False):
            for start in range(0, hidden.shape[0], rows):
                chunk = slice(start, start + rows)
                target = labels[chunk, None]
                logits = (hidden[chunk] @ projection.T).float()  # (C, V)
                if bias is not None:
                    logits += bias
                highest = logits.amax(dim=-1, keepdim=True)
                logits.sub_(highest)  # (C, V), at most 0
                loss -= (1 - label_smoothing) * logits.gather(1, target).sum()
                if label_smoothing:
                    loss -= label_smoothing * logits.mean(dim=-1).sum()
                exponentials = logits.exp_()
                norm = exponentials.sum(dim=-1, keepdim=True)
                loss += norm.log().sum()
                if not any(ctx.needs_input_grad):
                    continue
                gradient = exponentials.div_(norm)  # p, in the memory of the logits
                if label_smoothing:
                    gradient.sub_(label_smoothing / weight.shape[0])
                gradient.scatter_add_(1, target, torch.full_like(norm, label_smoothing - 1))
                if needs_bias_grad:
                    bias_grad += gradient.sum(dim=0)
                gradient = gradient.to(dtype)
                if needs_hidden_grad:
                    torch.mm(gradient, projection, out=hidden_grad[chunk])
                if needs_weight_grad:
                    weight_grad += (gradient.T @ hidden[chunk]).float()
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = [tensor.dtype if tensor is not None else None for tensor in (hidden_states, weight, bias)]
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        gradients = [
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None
