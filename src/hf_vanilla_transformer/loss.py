"""Label-smoothed cross-entropy over a large vocabulary: section 5.4 of "Attention Is All You Need".

The smoothed target distribution is (1 - eps) on the reference token plus eps / V on every token of the vocabulary
(Szegedy et al. 2016, the paper's reference 36; the same as `torch.nn.CrossEntropyLoss(label_smoothing=eps)`).

Shapes: N tokens, D d_model, V vocabulary, C tokens of one chunk.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .autocast import product_dtype

IGNORED = -100  # the label that says "not a target token", as everywhere in PyTorch and transformers
CHUNK_BYTES = 2**25  # of logits held at once
CHUNK_ROWS = 512  # of products in bfloat16 on a CPU, where larger ones are not faster
COMPILED_ROWS = 64  # oneDNN compiles such a product anew for each number of rows: let there be few of them
BLOCK_ELEMENTS = 2**18  # logits gone through at once, which a CPU's caches hold


def cross_entropy_of_logits(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Sum over the target tokens of the smoothed cross-entropy of softmax(logits): the formula as it stands.

    Args:
        logits: (..., V).
        labels: (...), token ids; `IGNORED` is left out.
        label_smoothing: eps.

    Returns:
        a scalar, float32.
    """
    return nn.functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def label_smoothed_cross_entropy(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float, bias: Tensor | None = None
) -> Tensor:
    """`cross_entropy_of_logits` of the logits hidden_states weight^T + bias, which never exist all at once.

    They are made, used and differentiated chunk by chunk, and only for real target tokens. Under `torch.compile` and
    `torch.func` the plain formula is used: its shapes do not depend on the data, and autograd knows all of it.

    Args:
        hidden_states: (..., D), what the output projection would receive.
        weight: (V, D), the output projection.
        labels: (...), token ids; `IGNORED` is left out.
        label_smoothing: eps.
        bias: (V), of the output projection, or None.

    Returns:
        a scalar, float32; divide it by the number of target tokens. It has first derivatives only: a backward pass
        with `create_graph=True` raises RuntimeError.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return cross_entropy_of_logits(nn.functional.linear(hidden_states, weight, bias), labels, label_smoothing)
    hidden_states = hidden_states.flatten(0, -2)
    labels = labels.flatten()
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
        def differentiate(logits: Tensor, chunk: slice) -> Tensor:
            return _differentiate(logits, labels[chunk, None], bias, label_smoothing)

        hidden = hidden_states.to(product_dtype(hidden_states))
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        loss, gradients = differentiate_in_chunks(hidden, weight, bias, ctx.needs_input_grad, differentiate, loss)
        if label_smoothing:
            loss -= _subtract_uniform(label_smoothing / weight.shape[0], hidden, weight, bias, gradients)
        keep_gradients(ctx, gradients, (hidden_states, weight, bias))
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        return *scaled_gradients(ctx, scale), None, None


def differentiate_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Sequence[bool],
    differentiate: Callable[[Tensor, slice], Tensor],
    total: Tensor,
    alike: int = 1,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Go through the logits chunk by chunk, in memory that is taken once.

    Args:
        hidden: (R, D), of the type in which to multiply.
        weight: (V, D), the output projection.
        bias: (V), or None.
        wanted: whether the gradients of `hidden`, `weight` and `bias` are.
        differentiate: from the logits (C, V) of a chunk, without the bias, and its rows, the loss; puts the loss's
            gradient in the place of the logits.
        total: what the losses are added to.
        alike: so many rows next to each other stay in one chunk.

    Returns:
        `total` with the losses, and the three gradients; None of what is not wanted.
    """
    projection, precise = weight.to(hidden.dtype), torch.promote_types(hidden.dtype, torch.float32)
    rows = alike * max(1, CHUNK_BYTES // (alike * len(weight) * hidden.dtype.itemsize))
    count = len(hidden)
    if hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16:
        rows = min(rows, CHUNK_ROWS)
        if rows > COMPILED_ROWS:
            rows -= rows % COMPILED_ROWS
        hidden = nn.functional.pad(hidden, (0, 0, 0, -count % COMPILED_ROWS))
    hidden_grad = torch.empty_like(hidden) if wanted[0] else None
    weight_grad = torch.zeros_like(weight, dtype=precise) if wanted[1] else None
    bias_grad = torch.zeros_like(bias, dtype=precise) if wanted[2] else None
    memory = hidden.new_empty(min(rows, len(hidden)), len(weight))  # CPUs are slow to touch new memory
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, count, rows):
            chunk = slice(start, start + rows)
            real = min(rows, count - start)
            logits = torch.mm(hidden[chunk], projection.T, out=memory[: len(hidden[chunk])])  # (C, V)
            total += differentiate(logits[:real], slice(start, start + real))
            gradient = logits  # in their memory; zero in the rows that only fill up, as their hidden states are
            if hidden_grad is not None:
                torch.mm(gradient, projection, out=hidden_grad[chunk])
            if weight_grad is not None:
                _add_product(weight_grad, gradient.T, hidden[chunk])
            if bias_grad is not None:
                bias_grad += gradient.sum(dim=0, dtype=precise)
    return total, (None if hidden_grad is None else hidden_grad[:count], weight_grad, bias_grad)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    # PyTorch would first convert all of the product to the total's type, in new memory
    rows = max(1, BLOCK_ELEMENTS // total.shape[1]) if total.device.type == "cpu" else len(total)
    for block, product in zip(total.split(rows), (left @ right).split(rows), strict=True):
        block += product


def keep_gradients(ctx, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> None:
    """For `scaled_gradients`, which gives them the shapes and types of `inputs`."""
    ctx.save_for_backward(*gradients)
    ctx.like = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs]


def scaled_gradients(ctx, scale: Tensor) -> list[Tensor | None]:
    """What `keep_gradients` kept, times `scale`.

    Raises:
        RuntimeError: somebody wants to differentiate again what are constants here.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("this loss has first derivatives only: leave out create_graph=True")
    return [
        None if gradient is None else (gradient * scale).to(like[1]).view(like[0])
        for gradient, like in zip(ctx.saved_tensors, ctx.like, strict=True)
    ]


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
    memory = torch.empty(min(rows, len(logits)), logits.shape[1], dtype=torch.float32, device=logits.device)
    for block, reference in zip(logits.split(rows), target.split(rows), strict=True):
        values = memory[: len(block)].copy_(block)
        if bias is not None:
            values += bias
        highest, at_reference = values.amax(dim=-1, keepdim=True), values.gather(1, reference)
        norm = values.sub_(highest).exp_().sum(dim=-1, keepdim=True)
        log_norm = highest + norm.log()
        loss += (log_norm - (1 - label_smoothing) * at_reference).sum()
        p = values.mul_(1 / norm)
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
    return share * ((states * rows).sum() + (0 if bias is None else bias.sum() * len(hidden)))
