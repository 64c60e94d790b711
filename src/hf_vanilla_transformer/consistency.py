"""Consistency training: every batch goes through the model twice, and the two predictions are drawn together.

- R-Drop (Liang et al. 2021, "R-Drop: Regularized Dropout for Neural Networks"): the two passes differ by dropout.
- SimCut (Gao et al. 2022, "Bi-SimCut: A Simple Strategy for Boosting Neural Machine Translation"): besides, tokens of
  source and target are cut out of the second pass.

Both passes are one batch of twice as many rows: one forward pass, through whatever the model is wrapped in.

Shapes: B pairs of a batch, T target length, N target tokens, D d_model, V vocabulary, C tokens of one chunk; where
there is a dimension of 2, it is the two passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .autocast import product_dtype
from .loss import BLOCK_ELEMENTS, IGNORED, differentiate_in_chunks, keep_gradients, scaled_gradients
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


class Objective(NamedTuple):
    """What is minimised, with KL_i = the divergence of the other pass from pass i, KL(pass i || other pass).

    sum over i of cross_entropy[i] * (label-smoothed cross-entropy of pass i) + alpha * divergence[i] * KL_i

    The gradient goes through both sides of each divergence, as in both papers.
    """

    cross_entropy: tuple[float, float]
    divergence: tuple[float, float]
    alpha: float
    cut: float = 0.0  # probability with which a token is cut out of the second pass


def rdrop(alpha: float) -> Objective:
    """R-Drop: half of the paper's loss, so that the cross-entropy weighs as much as in plain training.

    Args:
        alpha: as in the paper, where the cross-entropies of both passes are summed; 5 for translation.
    """
    return Objective(cross_entropy=(0.5, 0.5), divergence=(0.5, 0.5), alpha=alpha / 2)


def simcut(alpha: float, p: float) -> Objective:
    """SimCut: the cross-entropy of the clean pass, and the divergence of the cut pass from it.

    Args:
        alpha: 3 in the paper.
        p: the share of tokens that are cut, 0.05 in the paper.
    """
    return Objective(cross_entropy=(1.0, 0.0), divergence=(1.0, 0.0), alpha=alpha, cut=p)


class TwoPasses:
    """Lets a model be trained by an `Objective`, and keeps count of the divergence."""

    def __init__(self, objective: Objective):
        self.objective = objective
        self.divergence = self.tokens = 0

    @contextmanager
    def applied(
        self, model: VanillaTransformerForConditionalGeneration, inputs: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Inside the block the model's loss is the objective's; `model` itself may be inside of other modules.

        Args:
            inputs: a batch of B pairs, with `labels`.

        Yields:
            the batch that the model is to be called with: pair i is in rows 2i and 2i + 1 of all but the labels.
        """
        labels = inputs["labels"]
        decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
        rows = {"decoder_input_ids": decoder_input_ids, **inputs}
        doubled = {name: tensor.repeat_interleave(2, dim=0) for name, tensor in rows.items() if name != "labels"}
        embeddings = {model.model.encoder.embed_tokens, model.model.decoder.embed_tokens} if self.objective.cut else ()
        hooks = [embedding.register_forward_hook(partial(self._cut, model.config)) for embedding in embeddings]
        model._summed_loss = partial(self._summed_loss, model)  # where lm_head is at hand, also if it is sharded
        try:
            yield {**doubled, "labels": labels}
        finally:
            del model._summed_loss
            for hook in hooks:
                hook.remove()

    def totals(self) -> Tensor:
        """(2): the sum of the divergences and the number of target tokens since the last call, of this process."""
        totals = torch.stack([torch.as_tensor(total, dtype=torch.float32) for total in (self.divergence, self.tokens)])
        self.divergence = self.tokens = 0
        return totals

    def _summed_loss(
        self,
        model: VanillaTransformerForConditionalGeneration,
        hidden_states: Tensor,
        logits: Tensor | None,
        labels: Tensor,
    ) -> Tensor:
        """In the place of the model's own method; the first two tensors are (2B, T, D) and (2B, T, V)."""
        passes = (hidden_states if logits is None else logits).unflatten(0, (-1, 2)).transpose(1, 2)
        label_smoothing, head = model.config.label_smoothing, model.lm_head
        if logits is None:
            total, divergence = consistency_loss(
                passes, head.weight, labels, label_smoothing, self.objective, head.bias
            )
        else:
            total, divergence = _plain_loss(passes.float(), labels, label_smoothing, self.objective)
        self.divergence, self.tokens = self.divergence + divergence, self.tokens + labels.ne(IGNORED).sum()
        return total

    def _cut(self, config: Any, embedding: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        """Zero in the place of some tokens' embeddings; positions are added later, and stay.

        What marks the beginning and the end of a sentence is never cut.
        """
        (ids,) = inputs  # (2B, length)
        special = (config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id)
        cut = torch.rand(ids.shape, device=ids.device) < self.objective.cut
        cut &= torch.isin(ids, ids.new_tensor(special), invert=True)
        cut[::2] = False
        return embedded.masked_fill(cut[..., None], 0.0)


def consistency_loss(
    passes: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float,
    objective: Objective,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the objective over the target tokens, for the distributions softmax(passes weight^T + bias).

    As in `label_smoothed_cross_entropy`, the logits are made, used and differentiated chunk by chunk: they never
    exist as a whole. Under `torch.compile` the plain formula is used, whose shapes do not depend on the data.

    Args:
        passes: (..., 2, D), what the output projection would receive in either pass.
        weight: (V, D), the output projection.
        labels: (...), token ids; `IGNORED` is left out.
        label_smoothing: eps of the cross-entropies.
        objective: from `rdrop` or `simcut`.
        bias: (V), of the output projection, or None.

    Returns:
        the loss, and the divergence in it without its weight alpha, which has no gradient: scalars, float32, to be
        divided by the number of target tokens.
    """
    if torch.compiler.is_compiling():
        logits = nn.functional.linear(passes, weight, bias).float()
        return _plain_loss(logits, labels, label_smoothing, objective)
    is_target = labels != IGNORED
    return _ChunkedLoss.apply(passes[is_target], weight, bias, labels[is_target], label_smoothing, objective)


def _plain_loss(logits: Tensor, labels: Tensor, label_smoothing: float, objective: Objective) -> tuple[Tensor, Tensor]:
    """`consistency_loss` of logits (..., 2, V)."""
    reference = labels.clamp(min=0)[..., None, None].expand(*labels.shape, 2, 1)
    _, _, cross_entropy, divergence = _compare(logits, reference, label_smoothing)
    entropy_weights, divergence_weights = _columns(objective, logits)
    is_target = labels.ne(IGNORED)[..., None, None]
    divergence = (divergence_weights * divergence * is_target).sum()
    loss = (entropy_weights * cross_entropy * is_target).sum() + objective.alpha * divergence
    return loss, divergence.detach()


def _columns(objective: Objective, like: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the cross-entropies and of the divergences, (2, 1) each."""
    return like.new_tensor(objective.cross_entropy)[:, None], like.new_tensor(objective.divergence)[:, None]


def _compare(logits: Tensor, reference: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Args:
        logits: (..., 2, V).
        reference: (..., 2, 1), the token that either pass should predict.

    Returns:
        p = softmax(logits) and log p - log p of the other pass, (..., 2, V); the label-smoothed cross-entropies and
        the divergences KL(p || p of the other pass), (..., 2, 1).
    """
    log_p = logits.log_softmax(dim=-1)
    cross_entropy = log_p.gather(-1, reference) * (label_smoothing - 1)
    cross_entropy = cross_entropy - label_smoothing * log_p.mean(dim=-1, keepdim=True)
    p, difference = log_p.exp(), log_p - log_p.flip(-2)
    return p, difference, cross_entropy, (p * difference).sum(dim=-1, keepdim=True)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; the backward pass only scales them."""

    @staticmethod
    def forward(ctx, passes, weight, bias, labels, label_smoothing, objective) -> tuple[Tensor, Tensor]:
        def differentiate(logits: Tensor, chunk: slice) -> Tensor:
            targets = labels[chunk.start // 2 : chunk.stop // 2]
            return _differentiate(logits.unflatten(0, (-1, 2)), targets, bias, label_smoothing, objective)

        hidden = passes.flatten(0, 1).to(product_dtype(passes))  # rows 2i and 2i + 1 are token i
        totals = torch.zeros(2, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        totals, gradients = differentiate_in_chunks(
            hidden, weight, bias, ctx.needs_input_grad, differentiate, totals, alike=2
        )
        keep_gradients(ctx, gradients, (passes, weight, bias))
        loss, divergence = totals[0].clone(), totals[1].clone()
        ctx.mark_non_differentiable(divergence)
        return loss, divergence

    @staticmethod
    def backward(ctx, scale: Tensor, _):
        return *scaled_gradients(ctx, scale), None, None, None


def _differentiate(
    logits: Tensor, targets: Tensor, bias: Tensor | None, label_smoothing: float, objective: Objective
) -> Tensor:
    """Put the gradient in the place of the logits.

    With p and q the two distributions, y the smoothed target and d = log p - log q:
    d cross-entropy / d logits of p = p - y; d KL(p || q) / d logits of p = p (d - KL(p || q)), and of q = q - p.

    Args:
        logits: (C, 2, V), without the bias.
        targets: (C), the reference tokens.
        bias: (V).

    Returns:
        (2): loss and divergence, summed over C.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    totals = torch.zeros(2, dtype=precise, device=logits.device)
    entropy_weights, shares = _columns(objective, totals)
    pull = objective.alpha * shares  # weight of KL(p || q), seen from p
    rows = max(1, BLOCK_ELEMENTS // logits[0].numel()) if logits.device.type == "cpu" else len(logits)
    for block, target in zip(logits.split(rows), targets.split(rows), strict=True):
        values = block.to(precise)
        if bias is not None:
            values += bias
        reference = target[:, None, None].expand(-1, 2, 1)
        p, difference, cross_entropy, divergence = _compare(values, reference, label_smoothing)
        shared = (shares * divergence).sum()
        totals += torch.stack([(entropy_weights * cross_entropy).sum() + objective.alpha * shared, shared])
        gradient = difference.sub_(divergence).mul_(pull).add_(entropy_weights + pull.flip(0)).mul_(p)
        gradient.sub_(pull.flip(0) * p.flip(1)).sub_(entropy_weights * (label_smoothing / logits.shape[-1]))
        gradient.scatter_add_(2, reference, ((label_smoothing - 1) * entropy_weights).expand_as(reference))
        block.copy_(gradient)
    return totals
