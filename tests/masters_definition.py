"""Master weights in two bytes, as whole numbers in NumPy. Nothing of the package is used here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def bits_of(tensor: Tensor) -> np.ndarray:
    """The bits of bfloat16 or float32 numbers, as int64."""
    whole = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    bits = tensor.detach().cpu().contiguous().view(whole).numpy().astype(np.int64)
    return np.asarray(bits & (0xFFFF if tensor.itemsize == 2 else 0xFFFFFFFF))


def as_float32(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(bits).astype(np.uint32).view(np.int32)).view(torch.float32)


def nearest(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter that belongs to a float32 master. Halfway between two bfloat16 numbers it is the upper one in
    magnitude, and torch's own rounding elsewhere."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    device, master = master.device, master.detach().cpu()
    is_halfway = torch.from_numpy(np.asarray((bits_of(master) & 0xFFFF) == 0x8000))
    upper = as_float32(np.asarray(bits_of(master) & ~0xFFFF)).to(torch.float64)
    upper += torch.where(is_halfway, 2 * (master.double() - upper), 0.0)
    return torch.where(is_halfway & master.isfinite(), upper.to(dtype), master.to(dtype)).to(device)


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor:
    """What a step starts from: the parameter, its float32 master, or that which a remainder makes of it."""
    if "master_remainder" not in state:
        master: Tensor = state.get("master_param", param)
        return master.detach()
    bits, remainder = bits_of(param), state["master_remainder"].cpu().numpy().astype(np.int64)
    is_stale = ((bits & 0x7FFF == 0) & (remainder < 0)) | ((bits & 0x7FFF == 0x7F80) & (remainder > 0))
    return as_float32(np.asarray((bits << 16) + np.where(is_stale, 0, remainder))).to(param.device)
