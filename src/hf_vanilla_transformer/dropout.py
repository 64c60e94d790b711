"""Dropout (Srivastava et al. 2014; section 5.4 of "Attention Is All You Need"), as PyTorch has it, faster on CPUs.

PyTorch draws a number of double precision for each element; sixteen random bits are enough to decide.
"""

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 2**16  # elements decided at once: their bits stay in a CPU's caches


class Dropout(nn.Dropout):
    """`nn.Dropout`: in training, zero with probability `p`, and scaled by 1 / (1 - p) otherwise.

    On CPUs `p` is rounded to a multiple of 2^-16.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Of any shape."""
        applies = self.training and 0 < self.p < 1 and input.device.type == "cpu"
        if not applies or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return super().forward(input)
        return _SixteenBitDropout.apply(input, self.p)


class _SixteenBitDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, p: float) -> Tensor:
        mask = values.new_empty(values.shape)
        for block in mask.view(-1).split(BLOCK):
            # 64 bits are drawn at once, as many as fit in the generator's largest number
            drawn = torch.empty(-(-block.numel() // 4), dtype=torch.int64, device=values.device).random_(-(2**63), None)
            bits = drawn.view(torch.int16)[: block.numel()]
            # compared into floating point: PyTorch goes through booleans one by one
            torch.ge(bits, round(p * 2**16) - 2**15, out=block).mul_(1 / (1 - p))
        ctx.save_for_backward(mask)
        return values * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradient * mask, None


__all__ = ["Dropout"]
