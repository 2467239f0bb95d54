"""Copies tensors between host and device, asynchronously where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor

from swd_fused import captures


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copies by way of pinned memory, which torch keeps until the copy is done. From other memory CUDA may wait."""
    if device.type != "cuda":
        return values.to(device, non_blocking=True)
    pinned = values.pin_memory()
    if captures.is_capturing(device):
        captures.keep(pinned)  # the graph copies from it in each replay
    return pinned.to(device, non_blocking=True)


def moved(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On this device. What goes to the CPU is waited for: with `non_blocking` it would be read before it is there."""
    return value.to(device, dtype, non_blocking=device.type != "cpu")
