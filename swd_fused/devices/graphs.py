"""Keeps the memory that CUDA graphs refer to, and the step counts that they advance. Refuses a first step in a capture.

A captured step refers to memory by its address: tables, sums, step counts. A graph may be replayed at any time, mixed
with other graphs and with ordinary steps, and nothing tells when a graph was deleted. So:

- A captured step works on copies of the buckets. The optimizer keeps these, and pinned memory that graphs copy from, as
  long as it lives. Without the optimizer a graph has no moments either, and must not be replayed.
- Memory that the copies share with other steps' buckets was allocated before the capture. It is updated in place, and
  the copies never replace it.
- Memory allocated during a capture belongs to the copies alone: before the first replay it holds no values.
- Step counts that a graph advances stay at their address, and all other steps read and write them there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_pinned = threading.local()  # tensors that captures of this thread copy from, until their step fetches them
_shared_storages: dict[int, Any] = {}  # weak references by address


def is_capturing(device: torch.device) -> bool:
    """Returns whether launches on this device are being recorded in a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_capturing_on(devices: Iterable[torch.device]) -> bool:
    return any(map(is_capturing, devices))


def keep(pinned: Tensor) -> None:
    """Keeps pinned memory that a graph copies from in each replay, until `kept` is called."""
    _pinned.__dict__.setdefault("tensors", []).append(pinned)


def kept() -> list[Tensor]:
    """Hands over the tensors kept since the last call, including those of refused steps, for the caller to keep."""
    return _pinned.__dict__.pop("tensors", [])  # type: ignore[no-any-return]


def share_steps(steps: Iterable[Tensor]) -> None:
    """Notes that a graph advances these step counts. The captured step keeps them alive."""
    for address in [address for address, storage in _shared_storages.items() if storage.expired()]:
        del _shared_storages[address]
    for step in steps:
        storage = step.untyped_storage()
        if storage.data_ptr() not in _shared_storages:
            _shared_storages[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def any_are_shared() -> bool:
    """Returns whether graphs advance any step counts at all."""
    return bool(_shared_storages)


def are_shared(steps: Iterable[Tensor]) -> bool:
    """Returns whether a graph may have advanced some of these step counts, recognised by their address."""
    if not _shared_storages:
        return False
    found = (_shared_storages.get(step.untyped_storage().data_ptr()) for step in steps)
    return any(storage is not None and not storage.expired() for storage in found)  # expired: the address may be reused


def first_in_capture(step: str, reset: str) -> RuntimeError:
    """Returns the error for a captured step that would create values again in each replay."""
    return RuntimeError(
        f"FusedAdamS got the first step {step} in the capture of a CUDA graph, which would set {reset} back in each "
        "replay. Take such a step before, on a side stream."
    )
