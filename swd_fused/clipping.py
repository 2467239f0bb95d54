"""Counts the steps that clip, and warns where clipping leaves nothing of the schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.core.values import Groups
from swd_fused.devices import graphs
from swd_fused.devices.transfer import HostCopy, can_be_read, can_be_read_later, is_fake, to_device
from swd_fused.observer import Observer
from swd_fused.options import Options
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.step import Step

SCHEDULED_STEPS = 300


class ClippedSteps(Observer):
    """Counts the steps that clipped, and all that might have.

    The counts are numbers for steps on a CPU, where there is nothing to wait for and tensor operations would take half
    as long as a small step; else tensors.

    Warns, once, where clipping leaves nothing of the schedule, without making any step wait for its device: if each of
    the first steps was clipped, all had the same gradient norm, so the schedule divided by a constant.
    """

    def __init__(self) -> None:
        self._clipped = self._all = 0
        self._on_device: Tensor | None = None  # both again; a CUDA graph increases them in each replay
        self._pending: HostCopy | None = None
        self._steps_to_look = SCHEDULED_STEPS  # until `speak` looks at the counts
        self._options = Options()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the counts. The warning may have a copy from a device under way; another one starts anew."""
        return {name: getattr(self, name) for name in ("_clipped", "_all", "_on_device")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ClippedSteps.__init__(self)
        self.__dict__.update(state)

    def concerns(self, groups: Groups, options: Options) -> bool:
        self._options = options
        return options.max_grad_norm is not None

    def speak(self, groups: Groups) -> None:
        """Warns if all steps so far have clipped, as soon as the counts have arrived from their device."""
        counts = self._arrived()
        if counts is None:
            return
        self._pending, self.is_due = None, False
        decays = self._options.decay == "scheduled" and any(group["weight_decay"] for group in groups)
        if decays and 0 < counts[0] == counts[1]:
            warn_user(
                f"All of the first {SCHEDULED_STEPS} scheduled steps were clipped to max_grad_norm="
                f"{self._options.max_grad_norm:g}. So the rms gradient of each is the same, the schedule is constant, "
                "and AdamS is AdamW with another weight_decay. Pass a max_grad_norm above the usual norms, which "
                'optimizer.grad_norm tells; or use decay="decoupled", which does the same as now directly.'
            )

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Goes on counting: the share is that of all steps since the optimizer was made."""
        if is_fresh:  # steps of calibration decay as AdamW's by intention
            calibration = max((entry.get("calibration_steps", 0) for entry in entries), default=0)
            self._steps_to_look = SCHEDULED_STEPS + calibration

    def _arrived(self) -> tuple[float, float] | None:
        """Returns the counts, or None as long as they are on their way from a device."""
        clipped, counted = self.counts()
        if not isinstance(clipped, Tensor) or not isinstance(counted, Tensor):
            return float(clipped), float(counted)
        if self._pending is None and can_be_read_later(clipped):
            self._pending = HostCopy([clipped, counted])
        arrived = None if self._pending is None else self._pending.arrived()
        return None if arrived is None else (arrived[0], arrived[1])

    def note(self, step: Step) -> None:
        """Counts a step, unless it was skipped. One in several calls counts once."""
        if step.is_continued:
            return
        self._steps_to_look -= 1
        if self._steps_to_look == 0:
            self.is_due = True
        results, max_grad_norm = step.results, step.gate.max_grad_norm or math.inf
        if type(results) is Tensor and results.is_cpu:
            _, norm, skip = results.tolist()
        elif is_fake(results[1]):
            return
        elif can_be_read(results[1]):
            norm, skip = float(results[1]), step.skip is not None and bool(step.skip)
        else:
            self._count_on_device(results[1], max_grad_norm, step.skip)
            return
        if not skip:
            self._clipped += norm > max_grad_norm
            self._all += 1

    def _count_on_device(self, grad_norm: Tensor, max_grad_norm: float, skip: Tensor | None) -> None:
        if self._on_device is None:
            self._on_device = torch.zeros(2, dtype=torch.int64, device=grad_norm.device)
        self._on_device = to_device(self._on_device, grad_norm.device)
        clips = grad_norm > max_grad_norm
        is_taken = torch.ones_like(clips) if skip is None else skip == 0
        self._on_device.add_(torch.stack([clips & is_taken, is_taken]))

    def refuse_capture(self, step: Step) -> None:
        device = step.ranks.device
        if device.type != "cpu" and (self._on_device is None or self._on_device.device != device):
            raise graphs.first_in_capture("that clips", "the count of clipped steps")

    def share(self) -> float:
        """Returns the share of clipped steps, NaN before the first. Waits for the device."""
        clipped, counted = map(int, self.counts())
        return clipped / counted if counted else math.nan

    def counts(self) -> tuple[int | Tensor, int | Tensor]:
        """Returns the steps that clipped, and all that might have. Does not wait for the device."""
        clipped, counted = (0, 0) if self._on_device is None else self._on_device.unbind()
        return self._clipped + clipped, self._all + counted
