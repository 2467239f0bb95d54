"""Counts the steps in which clipping has changed the gradients. No step waits for the count."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swd_fused.schedule import StepScalars
from swd_fused.tensors.transfer import is_fake, to_device


class ClippedSteps:
    """The steps that clipped, and all that might have: numbers for steps on a CPU, tensors for those on a device.

    There is nothing to wait for on a CPU, and tensor operations would take half as long as a small step.
    """

    def __init__(self) -> None:
        self._clipped = self._all = 0
        self._on_device: Tensor | None = None  # both again; a CUDA graph increases them in each replay

    def is_ready_on(self, device: torch.device) -> bool:
        """Tells whether the next step on this device only has to increase what is there."""
        return device.type == "cpu" or (self._on_device is not None and self._on_device.device == device)

    def count(self, scalars: StepScalars | Tensor, max_grad_norm: float, may_skip: bool) -> None:
        """Counts a step, unless it was skipped."""
        value = scalars if isinstance(scalars, Tensor) else scalars.grad_norm
        if is_fake(value):
            return
        if not can_be_read(value):
            self._count_on_device(scalars[1], max_grad_norm, scalars[2] if may_skip else None)
            return
        _, grad_norm, skip = scalars.tolist() if isinstance(scalars, Tensor) else scalars
        if not (may_skip and skip):
            self._clipped += bool(grad_norm > max_grad_norm)
            self._all += 1

    def _count_on_device(self, grad_norm: Tensor, max_grad_norm: float, skip: Tensor | None) -> None:
        if self._on_device is None:
            self._on_device = torch.zeros(2, dtype=torch.int64, device=grad_norm.device)
        self._on_device = to_device(self._on_device, grad_norm.device)
        clipped, counted = self._on_device.unbind()
        clips = grad_norm > max_grad_norm
        if skip is None:
            clipped.add_(clips)
            counted.add_(1)
        else:
            is_taken = skip == 0
            clipped.add_(clips & is_taken)
            counted.add_(is_taken)

    def share(self) -> float:
        """Returns the share of clipped steps, NaN before the first. Waits for the device."""
        clipped, counted = (0, 0) if self._on_device is None else self._on_device.tolist()
        clipped, counted = self._clipped + clipped, self._all + counted
        return clipped / counted if counted else math.nan


def can_be_read(value: Tensor) -> bool:
    """Returns whether the host can look at a number without waiting for a device."""
    return value.is_cpu
