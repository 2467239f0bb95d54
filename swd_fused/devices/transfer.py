"""Copies tensors between host and device, asynchronously where that is safe."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from swd_fused.devices import graphs


def from_host(values: Tensor, device: torch.device) -> Tensor:
    """Copies host values to a device through pinned memory, since a copy from other memory may block the host."""
    if device.type != "cuda":
        return values.to(device, non_blocking=True)
    pinned = values.pin_memory()
    if graphs.is_capturing(device):
        graphs.keep(pinned)  # the graph copies from it in each replay
    return pinned.to(device, non_blocking=True)


def int64s(values: Iterable[int]) -> Tensor:
    """Returns whole numbers as a tensor on the host, much faster than torch.tensor."""
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64, device="cpu")


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums and scalars on a device: float64 if the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_device(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a value on this device. Waits for a copy to the CPU, which could be read before it has arrived."""
    return value.to(device, dtype, non_blocking=device.type != "cpu")


def on_device(value: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns a value that may be None on this device."""
    return None if value is None else to_device(value, device)


class HostCopy:
    """Copies a few numbers from a device to the host without waiting for them."""

    def __init__(self, values: list[Tensor]) -> None:
        device, dtype = values[0].device, values[0].dtype
        flat = torch.cat([value.detach().reshape(-1).to(device, dtype, non_blocking=True) for value in values])
        self._host = torch.empty(len(flat), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        self._host.copy_(flat, non_blocking=True)
        self._device = device
        self._arrival = torch.Event(device=device)
        self._arrival.record()

    def arrived(self) -> list[float] | None:
        """Returns the numbers, or None while they are being copied. Asking is not allowed in a capture."""
        if graphs.is_capturing(self._device) or not self._arrival.query():
            return None
        return self._host.tolist()


def can_be_read_later(value: Tensor) -> bool:
    """Returns whether a HostCopy can be made now: the tensor has memory, and no graph is being captured."""
    return not value.is_meta and not graphs.is_capturing(value.device)


def can_be_read(value: Tensor) -> bool:
    """Returns whether the host can look at a number without waiting for a device."""
    return value.is_cpu and not is_fake(value)


def is_fake(value: Tensor) -> bool:
    """Returns whether a tensor has no values to read: it is on the meta device, or traced without memory."""
    return value.is_meta or isinstance(value, torch._subclasses.FakeTensor)
