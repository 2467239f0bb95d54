"""From the host to a device without waiting for it."""

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


# A CUDA graph copies from this memory in each replay, and nobody tells when a graph is gone.
CAPTURED_UPLOADS: list[Tensor] = []
