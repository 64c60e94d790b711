"""Label-smoothed cross-entropy over a large vocabulary: section 5.4 of "Attention Is All You Need".

The smoothed target distribution is (1 - eps) on the reference token plus eps / V on every token of the vocabulary
(Szegedy et al. 2016, the paper's reference 36; the same as `torch.nn.CrossEntropyLoss(label_smoothing=eps)`).

Shapes: N tokens, D d_model, V vocabulary, C tokens of one chunk.
"""

import torch
from torch import Tensor, nn

IGNORED = -100  # the label that says "not a target token", as everywhere in PyTorch and transformers
CHUNK_BYTES = 2**25  # of logits held at once
BLOCK_ELEMENTS = 2**20  # logits gone through at once, which a CPU's caches hold


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

    With p = softmax(logits) and the smoothed target q: loss = -sum q log p, d loss / d logits = p - q. What is the same
    for every token of the vocabulary, eps / V, stays outside the chunks: the mean of the logits is the product with the
    mean row of the projection.
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
        rows = max(1, CHUNK_BYTES // (weight.shape[0] * dtype.itemsize))
        memory = hidden.new_empty(min(rows, len(hidden)), len(weight))  # taken once: CPUs are slow to touch new memory
        with torch.autocast(device_type, enabled=False):
            for start in range(0, hidden.shape[0], rows):
                chunk = slice(start, start + rows)
                logits = torch.mm(hidden[chunk], projection.T, out=memory[: len(hidden[chunk])])  # (C, V)
                loss += _differentiate(logits, labels[chunk, None], bias, label_smoothing)
                gradient = logits  # in their memory
                if needs_hidden_grad:
                    torch.mm(gradient, projection, out=hidden_grad[chunk])
                if needs_weight_grad:
                    weight_grad += gradient.T @ hidden[chunk]
                if needs_bias_grad:
                    bias_grad += gradient.sum(dim=0, dtype=torch.float32)
            if label_smoothing:
                gradients = hidden_grad, weight_grad, bias_grad
                loss -= _subtract_uniform(label_smoothing / weight.shape[0], hidden, weight, bias, gradients)
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


def _differentiate(logits: Tensor, target: Tensor, bias: Tensor | None, label_smoothing: float) -> Tensor:
    """Put the gradient in the place of the logits, for targets without the share that all tokens have alike.

    Args:
        logits: (C, V), without the bias; becomes p - (1 - eps) on the reference token.
        target: (C, 1), the reference token.
        bias: (V).

    Returns:
        the sum over C of log(sum exp(logits)) - (1 - eps) logit of the reference token, float32.
    """
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for block, reference in zip(logits.split(rows), target.split(rows), strict=True):
        values = block.float()
        if bias is not None:
            values += bias
        highest, at_reference = values.amax(dim=-1, keepdim=True), values.gather(1, reference)
        p = values.softmax(dim=-1)
        log_norm = highest - p.amax(dim=-1, keepdim=True).log()
        loss += (log_norm - (1 - label_smoothing) * at_reference).sum()
        p.scatter_(1, reference, (at_reference - log_norm).exp() - (1 - label_smoothing))
        block.copy_(p)
    return loss


def _subtract_uniform(
    share: float, hidden: Tensor, weight: Tensor, bias: Tensor | None, gradients: tuple[Tensor | None, ...]
) -> Tensor:
    """Take `share` = eps / V of each logit off the gradients (of hidden states, weight, bias; None is passed over).

    Returns:
        what it takes off the loss: `share` times the sum of all logits, float32.
    """
    hidden_grad, weight_grad, bias_grad = gradients
    states, rows = hidden.sum(dim=0, dtype=torch.float32), weight.sum(dim=0, dtype=torch.float32)  # (D) each
    if hidden_grad is not None:
        hidden_grad -= (share * rows).to(hidden_grad.dtype)
    if weight_grad is not None:
        weight_grad -= share * states
    if bias_grad is not None:
        bias_grad -= share * len(hidden)
    return share * (states @ rows + (0 if bias is None else bias.sum() * len(hidden)))
