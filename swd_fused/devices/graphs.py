"""Keeps alive what CUDA graphs refer to, knows the step counts that they advance, and refuses what they cannot do.

A captured step refers to memory by its address: tables, sums, step counts. A graph may be replayed at any time, mixed
with other graphs and with steps that are not captured, and nobody tells when it is gone. So:

- A captured step works on copies of the buckets, which the optimizer keeps as long as it lives, and so does the pinned
  memory that a graph copies from. Without the optimizer a graph has no moments either, and must not be replayed.
- What the copies share with the buckets of other steps was made before the capture, is never replaced in the copies,
  and is updated in place.
- What is made during a capture is in the copies alone: until the graph is replayed there is nothing in it.
- Step counts that a graph advances stay where they are, and everybody else reads and writes them there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Pinned(threading.local):
    """Holds what captures of this thread copy from, until their step fetches it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


_pinned = _Pinned()
_weak_reference: Any = StorageWeakRef  # which has no types
_shared_storages: dict[int, Any] = {}  # weak references by address


def is_capturing(device: torch.device) -> bool:
    """Returns whether what is launched on this device now is recorded in a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_capturing_on(devices: Iterable[torch.device]) -> bool:
    return any(map(is_capturing, devices))


def keep(pinned: Tensor) -> None:
    """Keeps pinned memory that a graph copies from in each replay, for whoever calls `kept` next."""
    _pinned.tensors.append(pinned)


def kept() -> list[Tensor]:
    """Returns what was kept since the last call, to a step that was captured: its optimizer must keep it from now on.

    What a refused step has left comes with that of the next one.
    """
    tensors, _pinned.tensors = _pinned.tensors, []
    return tensors


def share_steps(steps: Iterable[Tensor]) -> None:
    """Notes that a graph advances these step counts, which the captured step keeps."""
    for address in [address for address, storage in _shared_storages.items() if storage.expired()]:
        del _shared_storages[address]
    for step in steps:
        storage = step.untyped_storage()
        if storage.data_ptr() not in _shared_storages:
            _shared_storages[storage.data_ptr()] = _weak_reference(storage)


def any_are_shared() -> bool:
    """Returns whether graphs advance any step counts at all."""
    return bool(_shared_storages)


def are_shared(steps: Iterable[Tensor]) -> bool:
    """Returns whether a graph may have advanced some of these step counts. They are recognised by their address, which
    after they are gone may be that of others."""
    if not _shared_storages:
        return False
    found = (_shared_storages.get(step.untyped_storage().data_ptr()) for step in steps)
    return any(storage is not None and not storage.expired() for storage in found)


def check_prepared(devices: Iterable[torch.device]) -> None:
    """Raises if a step for which everything must be set up anew is captured."""
    if is_capturing_on(devices):
        raise RuntimeError(
            "FusedAdamS got the first step of some parameters, or the first with other state, in the capture of a CUDA "
            "graph, which would start anew in each replay. Take such a step before, on a side stream."
        )
