"""Translating with 8-bit weights on a CPU, by PyTorch's own dynamic quantisation.

The weights of every linear layer become 8-bit integers with a scale for each output; what goes into the layer is
rounded to 8 bits (7 on some processors) on the fly, with one scale for all that goes in at once; everything else stays
in float32. Where a CPU has no AMX, several processes (see `workers`) translate with a large model fastest in this way;
otherwise bfloat16 is as fast or faster. PyTorch has announced that it will remove these layers.
"""

import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .errors import UserError


def quantize_linear_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear layers of `model`, which is changed and returned; it can no longer be trained or saved.

    Args:
        model: in float32, on a CPU.

    Raises:
        UserError: another type or device; this PyTorch no longer has such layers.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise UserError(f"8-bit weights are made from float32 on a CPU, not from {model.dtype} on {model.device}")
    try:
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
    except ImportError as error:
        raise UserError("this PyTorch has no 8-bit layers for CPUs any more: take bfloat16") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated")  # announced above
        quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
    model.save_pretrained = _refuse_to_save
    return model


def computing_type(model: PreTrainedModel) -> str:
    """What the products of `model` are computed in: "int8", "float32", ..."""
    is_quantized = any(vars(module).get("save_pretrained") is _refuse_to_save for module in model.modules())
    return "int8" if is_quantized else str(model.dtype).removeprefix("torch.")


def _refuse_to_save(*args: Any, **kwargs: Any):
    raise UserError("a model with 8-bit weights cannot be saved: save the one that it was made from")
