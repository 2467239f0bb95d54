"""Keeps alive what CUDA graphs refer to, knows the step counts that they advance, and refuses what they cannot do.

A captured step refers to memory by its address: tables, sums, step counts. A graph may be replayed at any time, mixed
with other graphs and with steps that are not captured, and nobody tells when it is gone. So:

- A captured step works on copies of the buckets, which the optimizer keeps as long as it lives. What they share with
  the buckets of other steps was made before the capture, is never replaced in the copies, and is updated in place.
- What is made during a capture is in the copies alone: until the graph is replayed there is nothing in it.
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


def is_capturing_on(devices: Iterable[torch.device]) -> bool:
    return any(map(is_capturing, devices))


def keep(*objects: object) -> None:
    _kept.extend(objects)


def share_steps(steps: Iterable[Tensor]) -> None:
    """Notes that a graph advances these step counts."""
    storages = {step.untyped_storage().data_ptr(): step for step in steps}
    _kept.extend(step for address, step in storages.items() if address not in _shared_storages)
    _shared_storages.update(storages)


def any_are_shared() -> bool:
    """Returns whether graphs advance any step counts at all."""
    return bool(_shared_storages)


def are_shared(steps: Iterable[Tensor]) -> bool:
    """Returns whether a graph may have advanced some of these step counts. They are recognised by their address: memory
    that is kept for graphs is never given out again."""
    return bool(_shared_storages) and any(step.untyped_storage().data_ptr() in _shared_storages for step in steps)


def check_prepared(devices: Iterable[torch.device]) -> None:
    """Raises if a step for which everything must be set up anew is captured."""
    if is_capturing_on(devices):
        raise RuntimeError(
            "FusedAdamS got the first step of some parameters, or the first with other state, in the capture of a CUDA "
            "graph, which would start anew in each replay. Take such a step before, on a side stream."
        )


def check_step(
    carries_sum: bool, is_lagged_over_ranks: bool, is_calibrating: bool, is_first_to_skip: bool, is_first_to_clip: bool
) -> None:
    """Raises if a captured step has to do what a graph could not do again in each replay."""
    if carries_sum:
        raise RuntimeError(
            "FusedAdamS got step(grad_sumsq=, numel=) in the capture of a CUDA graph, where the sum of the whole model "
            "cannot be carried on. Leave out numel, and step all parameters at once."
        )
    if is_lagged_over_ranks:
        raise RuntimeError(
            "FusedAdamS got a step that needs one pass, over several ranks, in the capture of a CUDA graph: the sums "
            'of the step before are on their way between the ranks. Use schedule="exact" and decay="scheduled".'
        )
    if is_calibrating:
        raise RuntimeError(
            "FusedAdamS got a step in the capture of a CUDA graph while weight decay is still matched to AdamW's, "
            "which replays could not bring to an end. Take calibration_steps and one more step before."
        )
    if is_first_to_skip:
        raise RuntimeError(
            "FusedAdamS got the first step that may be skipped in the capture of a CUDA graph, which would set "
            "skipped_steps back in each replay. Take such a step before, on a side stream."
        )
    if is_first_to_clip:
        raise RuntimeError(
            "FusedAdamS got the first step that clips in the capture of a CUDA graph, which would set the count of "
            "clipped steps back in each replay. Take such a step before, on a side stream."
        )
