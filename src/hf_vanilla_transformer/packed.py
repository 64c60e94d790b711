"""Translating in bfloat16 on a CPU with weights that lie as its matrix products read them.

PyTorch brings the weight of a linear layer into the order of oneDNN anew in each product. Where a search writes one
word of some hundred sentences, that takes about as long as the product. Here it is done once, with the operators that
`torch.compile` uses for it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class PackedLinear(nn.Linear):
    """An `nn.Linear` with a second copy of its weight, in the order of the product.

    Args:
        linear: whose parameters are taken over, not copied.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        self._packed: Tensor | None = None
        self._packed_from: tuple[int, int] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out). What needs gradients, a graph or another type is left to `nn.Linear`."""
        if (
            torch.is_grad_enabled()
            or not input.dtype == self.weight.dtype == torch.bfloat16
            or not input.device.type == self.weight.device.type == "cpu"
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or torch._C._are_functorch_transforms_active()
        ):
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self._in_order(), self.bias, "none", [], "")

    def _in_order(self) -> Tensor:
        # others may write into the weight, but for one that was made in inference mode
        version = (self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version)
        if self._packed is None or self._packed_from != version:
            self._packed, self._packed_from = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach()), version
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        """Without the copy, which cannot be pickled; it is made again."""
        return {**self.__dict__, "_packed": None}


def pack_linear_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear layers of `model`, which is changed and returned, where that makes products faster.

    That is in bfloat16, on CPUs for which oneDNN has such products; elsewhere nothing happens. The weights of the
    layers take their memory twice from the first use on.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not _has_products():
        return model
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, PackedLinear(module))
    return model


def _has_products() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
