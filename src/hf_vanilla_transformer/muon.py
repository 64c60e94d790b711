"""Muon for the matrices of the layers, AdamW for everything else, as one optimiser.

Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") steps in the direction of the
orthogonal matrix nearest to the momentum. Its steps are scaled to the size of AdamW's, as Liu et al. 2025, "Muon is
Scalable for LLM Training", section 2.2, so that one learning rate and one schedule serve both. Both are PyTorch's.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from .errors import UserError


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
        self.parts = [torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")]
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

    @torch.no_grad()
    def step(self, closure: None = None):
        for part in self.parts:
            part.step()


def require_muon():
    """Raises UserError where PyTorch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"muon needs PyTorch 2.9 or newer, not {torch.__version__}: update it or train without")


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices that turn hidden states into hidden states: neither embeddings nor output projection."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(id(model.get_output_embeddings().weight))
    return [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 and parameter.requires_grad and id(parameter) not in tables
    ]
