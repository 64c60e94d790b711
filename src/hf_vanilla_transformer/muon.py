"""Muon for the matrices of the layers, AdamW for everything else, as one optimiser.

Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") steps in the direction of the
orthogonal matrix nearest to the momentum. Its steps are scaled to the size of AdamW's, as Liu et al. 2025, "Muon is
Scalable for LLM Training", section 2.2, so that one learning rate and one schedule serve both.

AdamW is PyTorch's. PyTorch's Muon takes the matrices one by one, in three small products each iteration; here those of
one shape go together, and the steps are the same.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from .errors import UserError

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of x, x^3 and x^5 (Jordan et al. 2024)
STACKED = 2**20  # elements of the matrices that go together: larger ones are fast alone


class Muon(Optimizer):
    """The steps of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` and Nesterov momentum.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate; the root mean square of a step is about a fifth of it.
        weight_decay: decoupled, as AdamW's.
        momentum: share of the momentum that stays.

    Raises:
        ValueError: a parameter that is no matrix.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        if any(matrix.ndim != 2 for matrix in matrices):
            raise ValueError("Muon steps with matrices only")
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = _evaluated(closure)
        for group in self.param_groups:
            alike = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike[matrix.shape, matrix.device, matrix.dtype, type(matrix)].append(matrix)
            for matrices in alike.values():
                count = max(1, STACKED // max(1, matrices[0].numel()))
                for start in range(0, len(matrices), count):
                    self._step(matrices[start : start + count], group)
        return loss

    def _step(self, matrices: list[nn.Parameter], group: dict[str, Any]):
        """Of matrices that can be stacked."""
        gradients = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = orthogonalized(torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"])))
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        length = 0.2 * max(matrices[0].shape) ** 0.5 * group["lr"]
        torch._foreach_add_(matrices, directions.to(matrices[0].dtype).unbind(), alpha=-length)


def orthogonalized(matrices: Tensor) -> Tensor:
    """U V^T of the singular value decompositions U S V^T, roughly: five Newton-Schulz iterations in bfloat16 (Jordan et
    al. 2024). Singular values above 0.002 of the Frobenius norm come between 0.68 and 1.2, smaller ones stay smaller.

    Args:
        matrices: (N, R, C).

    Returns:
        (N, R, C), bfloat16.
    """
    first, third, fifth = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(torch.bfloat16, memory_format=torch.contiguous_format)
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=third, alpha=fifth), x, beta=first)
    return x.mT if tall else x


class MuonWithAdamW(Optimizer):
    """One optimiser to schedulers and checkpoints; its groups are Muon's, then those of AdamW.

    Args:
        model: embeddings, output projection, biases and norms are AdamW's, all other matrices Muon's.
        undecayed: names of parameters without weight decay.
        lr: peak learning rate of both.
        weight_decay: of both.
        betas, eps: of AdamW.

    Raises:
        UserError: a model without a matrix to train.
    """

    def __init__(
        self,
        model: nn.Module,
        undecayed: set[str],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ):
        matrices = matrices_of_layers(model)
        if not matrices:
            raise UserError("muon: no matrix of the layers is trained: train without")
        muons = {id(matrix) for matrix in matrices}
        decayed, plain = [], []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in muons:
                (plain if name in undecayed else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.parts = [Muon(matrices, lr=lr, weight_decay=weight_decay)]
        if groups:
            self.parts.append(AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self):
        """The parts work on the state and the groups of this optimiser, which are those in a checkpoint."""
        for part, groups in zip(self.parts, (self.param_groups[:1], self.param_groups[1:]), strict=False):
            part.state, part.param_groups = self.state, groups

    def load_state_dict(self, state_dict: dict[str, Any]):
        super().load_state_dict(state_dict)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]):
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = _evaluated(closure)
        for part in self.parts:
            part.step()
        return loss


def _evaluated(closure: Callable[[], Tensor] | None) -> Tensor | None:
    """The loss that a caller of `step` wants computed anew, with its gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices that turn hidden states into hidden states: neither embeddings nor output projection."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(id(model.get_output_embeddings().weight))
    return [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 and parameter.requires_grad and id(parameter) not in tables
    ]
