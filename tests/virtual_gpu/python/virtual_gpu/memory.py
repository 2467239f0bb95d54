"""Shows the memory of each device as bytes that NumPy and torch's CPU operations can work on."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .driver import library, settings

SIZE = library.vgpu_memory_size()
BASES = [library.vgpu_memory(device) for device in range(settings.devices)]
BYTES = [np.frombuffer((ctypes.c_uint8 * SIZE).from_address(base), np.uint8) for base in BASES]

_MOST = 1 << 16


def allocations(device: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and last addresses of all live allocations, in order."""
    ends = np.empty(_MOST, np.int64)
    starts = np.empty(_MOST, np.int64)
    pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_long)) for array in (starts, ends)]
    count = library.vgpu_allocations(device, *pointers, _MOST)
    return starts[:count], ends[:count]


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor on the same memory."""
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    device = tensor.device.index
    start = tensor.data_ptr() - BASES[device]
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    raw = torch.from_numpy(BYTES[device][start : start + elements * tensor.element_size()])
    twin = raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
    if tensor.is_neg():
        twin = torch._neg_view(twin)
    return twin.conj() if tensor.is_conj() else twin
