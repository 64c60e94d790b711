"""Searching in bfloat16 on a CPU with weights that lie as the matrix products read them.

PyTorch brings the weight of a linear layer into the order of oneDNN anew in each product. Where a search writes one
word of some hundred sentences, that takes about as long as the product. Here it is done once for each search, with the
operators that `torch.compile` uses for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
            layer.forward = partial(_product, layer, packed)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _product(layer: nn.Linear, packed: Tensor, input: Tensor) -> Tensor:
    """(..., in) -> (..., out), by PyTorch where a graph is made of it or where something is converted."""
    if torch.compiler.is_compiling() or input.dtype != torch.bfloat16 or torch.is_autocast_enabled("cpu"):
        return nn.Linear.forward(layer, input)
    return torch.ops.mkldnn._linear_pointwise(input, packed, layer.bias, "none", [], "")


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and "forward" not in vars(module)
    )


def _has_products() -> bool:
    return torch.backends.mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported()


__all__ = ["packed_linear_layers"]
