"""Embeddings and positions: sections 3.4 and 3.5 of "Attention Is All You Need".

Difference from the paper: embeddings can be left unscaled.

Shapes: B batch, T length, D d_model, V vocabulary.
"""

import torch
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """Section 3.4: learned token embeddings, multiplied by `scale` (sqrt(d_model) in the paper)."""

    def __init__(self, vocab_size: int, d_model: int, scale: float):
        super().__init__(vocab_size, d_model)
        self.embed_scale = scale  # PEFT scales what an adapter adds by the attribute of this name

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)."""
        embedded = super().forward(input_ids)
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale


def sinusoid_table(num_positions: int, d_model: int, device: torch.device | str | None = None) -> Tensor:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same angle.

    Returns:
        (num_positions, d_model), float32, computed in float64.
    """
    exact = {"dtype": torch.float64, "device": device}
    if device is not None and torch.device(device).type == "mps":  # Apple's GPUs have no float64
        exact["device"] = "cpu"
    positions = torch.arange(num_positions, **exact)
    exponents = torch.arange(0, d_model, 2, **exact) / d_model
    angles = positions[:, None] / 10000.0**exponents  # (positions, D / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model].float().to(device)


class SinusoidalPositions(nn.Module):
    """Section 3.5. The table is a function of its shape: computed on first use, never stored or loaded.

    It grows on demand: the paper chose sinusoids because they "may allow the model to extrapolate to sequence
    lengths longer than the ones encountered during training".
    """

    def __init__(self, num_positions: int, d_model: int):
        super().__init__()
        self.num_positions = num_positions
        self.d_model = d_model
        self._table: Tensor | None = None

    def forward(self, position_ids: Tensor, length: int) -> Tensor:
        """
        Args:
            position_ids: (T) or (B, T), all below `length`.
            length: how many positions are in use.

        Returns:
            (T, D) or (B, T, D), float32.
        """
        table = self._table
        if table is None or table.shape[0] < length or table.device != position_ids.device:
            rows = max(length, self.num_positions)
            table = sinusoid_table(rows, self.d_model, position_ids.device)
            if _is_of_use_later(table):
                self._table = table
        return nn.functional.embedding(position_ids, table)


def _is_of_use_later(tensor: Tensor) -> bool:
    """Not so what a tracer, `torch.func` or a mode without numbers makes; compiled code makes plain ones."""
    if torch.compiler.is_compiling():
        return True
    return type(tensor) is Tensor and not (torch.jit.is_tracing() or torch._C._are_functorch_transforms_active())


class LearnedPositions(nn.Embedding):
    """Table 3, row E of the paper: learned positional embeddings instead of sinusoids."""

    def forward(self, position_ids: Tensor, length: int) -> Tensor:
        """As `SinusoidalPositions.forward`.

        Raises:
            ValueError: `length` is over the number of positions that were learned.
        """
        if length > self.num_embeddings:
            raise ValueError(
                f"a sequence of {length} tokens does not fit: the model learned "
                f"{self.num_embeddings} positions (max_position_embeddings)"
            )
        return super().forward(position_ids)
