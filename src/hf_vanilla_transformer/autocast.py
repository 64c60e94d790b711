"""What `torch.autocast` does, for code that wants to do it once or by hand."""

import torch
from torch import Tensor


def product_dtype(states: Tensor) -> torch.dtype:
    """The type in which `states` are multiplied: that of autocast where it is on; double precision stays."""
    device_type = states.device.type
    if (
        states.dtype == torch.float64
        or not torch.amp.is_autocast_available(device_type)
        or not torch.is_autocast_enabled(device_type)
    ):
        return states.dtype
    return torch.get_autocast_dtype(device_type)
