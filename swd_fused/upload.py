"""Between the host and devices, without waiting where that is right."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """By way of pinned memory, which torch keeps until the copy is done. From other memory CUDA may wait."""
    if device.type != "cuda":
        return values.to(device, non_blocking=True)
    pinned = values.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        CAPTURED_UPLOADS.append(pinned)
    return pinned.to(device, non_blocking=True)


def moved(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On this device. What goes to the CPU is waited for: with `non_blocking` it would be read before it is there."""
    return value.to(device, dtype, non_blocking=device.type != "cpu")


# A CUDA graph copies from this memory in each replay, and nobody tells when a graph is gone.
CAPTURED_UPLOADS: list[Tensor] = []
