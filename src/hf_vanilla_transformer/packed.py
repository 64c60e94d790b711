"""Translating on a CPU with weights that lie as the matrix products of oneDNN read them.

PyTorch brings the weight of a linear layer of bfloat16 into that order anew in each product. Where a search writes one
word of some hundred sentences, that takes a good part of the time. Here it is done once for each layer and all
batches of a text, with the operators that `torch.compile` uses for it.

In float32 PyTorch multiplies with MKL, which is far slower than oneDNN on CPUs of AMD.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MANY = 256  # rows, for which packing pays at once
IS_AMD = "AMD" in getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "")  # older PyTorch does not say


@contextmanager
def packed_linear_layers(model: nn.Module) -> Iterator[None]:
    """Inside the block, linear layers multiply by a copy of their weight in the order of the product.

    Weights must not change inside, and there are no gradients. Layers that are not plain (of another type or device,
    with weights of a library's own, with a `forward` that somebody has put there) stay as they are, and so do those of
    types in which oneDNN is no faster on this CPU.
    """
    types = _faster_types()
    layers = [module for module in model.modules() if _is_plain(module) and module.weight.dtype in types]
    try:
        for layer in layers:
            layer.forward = _Product(layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


class _Product:
    """What a layer computes inside the block.

    A weight that is for few rows is packed at its second use: some are used once only.
    """

    def __init__(self, layer: nn.Linear):
        self.layer = layer
        self.was_used = False
        self.packed: Tensor | None = None

    def __call__(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), by PyTorch where a graph is made of it or where something is converted."""
        converts = input.dtype != self.layer.weight.dtype or torch.is_autocast_enabled("cpu")
        pays = self.was_used or input.shape[:-1].numel() >= MANY
        if torch.compiler.is_compiling() or converts or not pays:
            self.was_used = True
            return nn.Linear.forward(self.layer, input)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.layer.weight.detach())
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.layer.bias, "none", [], "")


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and "forward" not in vars(module)
    )


def _faster_types() -> set[torch.dtype]:
    """In which oneDNN is faster here with packed weights."""
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return set()
    types = {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
    return types | ({torch.float32} if IS_AMD and torch.backends.mkl.is_available() else set())
