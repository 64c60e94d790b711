"""Averages of weights: over the last checkpoints (section 6.1 of "Attention Is All You Need"), and over all steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .errors import UserError


def average_checkpoints(folders: Sequence[Path], tied: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """The mean of the weights in `folder/model.safetensors` of each folder, summed in float64.

    Args:
        folders: of the checkpoints.
        tied: names of a model's tied weights to the name of what they are tied to. A checkpoint holds one of them.

    Returns:
        a state dict with the dtypes of the first checkpoint.

    Raises:
        UserError: checkpoints that hold different weights.
    """
    tied = tied or {}
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for folder in folders:
        weights = {tied.get(n, n): w for n, w in load_file(Path(folder) / "model.safetensors").items()}
        if total and (other := total.keys() ^ weights.keys()):
            raise UserError(
                f"{folder} and {folders[0]} do not hold the same weights: {min(other)} is in one of them only"
            )
        for name, weight in weights.items():
            dtypes.setdefault(name, weight.dtype)
            total[name] = total[name] + weight.double() if name in total else weight.double()
    return {name: (weight / len(folders)).to(dtypes[name]) for name, weight in total.items()}


class ExponentialMovingAverage:
    """shadow <- decay * shadow + (1 - decay) * weights, after each optimiser step.

    For the first steps the decay is lower, (1 + n) / (10 + n) after n steps, so that the random start is forgotten.

    Args:
        model: whose trainable parameters are followed.
        decay: weight of the past.
    """

    FILE = "ema.safetensors"

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.shadow = {name: weight.detach().clone().float() for name, weight in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int):
        """Take in the weights after optimiser step `step` (1 for the first)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self.shadow.values()), [weight.float() for weight in self.parameters.values()], 1 - decay
        )

    @torch.no_grad()
    def copy_to_model(self):
        for name, weight in self.parameters.items():
            weight.copy_(self.shadow[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the block and its own again afterwards."""
        own = {name: weight.detach().clone() for name, weight in self.parameters.items()}
        self.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self.parameters.items():
                    weight.copy_(own[name])

    def save(self, folder: Path):
        save_file(self.shadow, Path(folder) / self.FILE)

    def load(self, folder: Path):
        for name, weight in load_file(Path(folder) / self.FILE).items():
            self.shadow[name].copy_(weight)
