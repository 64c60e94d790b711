"""Translating in bfloat16 on a CPU with weights that lie as the matrix products read them.

PyTorch brings the weight of a linear layer into the order of oneDNN anew in each product. Where a search writes one
word of some hundred sentences, that takes a good part of the time. Here it is done once for each layer and all
batches of a text, with the operators that `torch.compile` uses for it. For a single batch it would hardly pay.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def packed_linear_layers(model: nn.Module) -> Iterator[None]:
    """Inside the block, linear layers of bfloat16 multiply by a copy of their weight in the order of the product.

    Weights must not change inside, and there are no gradients. Layers that are not plain (of another type or device,
    with weights of a library's own, with a `forward` that somebody has put there) stay as they are, and so do all on a
    CPU for which oneDNN has no such products.
    """
    layers = [module for module in model.modules() if _is_plain(module)] if _has_products() else []
    try:
        for layer in layers:
            layer.forward = _Product(layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


class _Product:
    """What a layer computes inside the block; its weight is packed at the second use, for some are used once only."""

    def __init__(self, layer: nn.Linear):
        self.layer = layer
        self.was_used = False
        self.packed: Tensor | None = None

    def __call__(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), by PyTorch where a graph is made of it or where something is converted."""
        converts = input.dtype != torch.bfloat16 or torch.is_autocast_enabled("cpu")
        if torch.compiler.is_compiling() or converts or not self.was_used:
            self.was_used = True
            return nn.Linear.forward(self.layer, input)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.layer.weight.detach())
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.layer.bias, "none", [], "")


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and "forward" not in vars(module)
    )


def _has_products() -> bool:
    mkldnn = torch.backends.mkldnn
    return mkldnn.is_available() and mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported()
