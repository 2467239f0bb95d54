"""Keeps alive what CUDA graphs refer to, and knows the step counts that they advance.

A captured step refers to memory by its address: tables, sums, step counts. A graph may be replayed at any time, mixed
with other graphs and with steps that are not captured, and nobody tells when it is gone. So:

- What was made before a capture and is used in it is kept for good: some 100 bytes for each tensor of the model.
- What is made during a capture belongs to that graph alone: until the graph is replayed there is nothing in it.
- Step counts that a graph advances stay where they are, and everybody else reads and writes them there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_kept: list[object] = []
_shared_storages: set[int] = set()


def is_capturing(device: torch.device) -> bool:
    """Returns whether what is launched on this device now is recorded in a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep(*objects: object) -> None:
    _kept.extend(objects)


def share_steps(steps: Iterable[Tensor]) -> None:
    """Notes that a graph advances these step counts."""
    storages = {step.untyped_storage().data_ptr(): step for step in steps}
    _kept.extend(step for address, step in storages.items() if address not in _shared_storages)
    _shared_storages.update(storages)


def are_shared(steps: Iterable[Tensor]) -> bool:
    """Returns whether a graph may have advanced some of these step counts. Kept memory is never given out again, so
    that an address tells."""
    return bool(_shared_storages) and any(step.untyped_storage().data_ptr() in _shared_storages for step in steps)
