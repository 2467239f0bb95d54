"""Counts the steps that clip, and warns where clipping leaves nothing of the schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.core.values import Groups
from swd_fused.devices.transfer import HostCopy, can_be_read, can_be_read_later, is_fake, to_device
from swd_fused.options import Options
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.step import Step

SCHEDULED_STEPS = 300
NEVER = -1

Counts = tuple[int | Tensor, int | Tensor]  # of clipped steps, and of all that might have been


class ClippedSteps:
    """Counts the steps that clipped, and all that might have.

    The counts are numbers for steps on a CPU, where there is nothing to wait for and tensor operations would take half
    as long as a small step; else tensors.

    Warns, once, where clipping leaves nothing of the schedule, without making any step wait for its device: if each of
    the first scheduled steps was clipped, all had the same gradient norm, so the schedule divided by a constant. In
    between nobody is called: that would be noticed in small models.
    """

    needs_small_mean = False

    def __init__(self) -> None:
        self._clipped = self._all = 0
        self._on_device: Tensor | None = None  # both again; a CUDA graph increases them in each replay
        self._before: Counts | None = None  # the scheduled steps
        self._pending: HostCopy | None = None
        self._steps_to_look = 0  # until it looks at the counts again
        self.is_due = True
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
        """Looks at the counts before a step, to warn."""
        self.is_due = False
        if self._options.decay == "scheduled":
            self._steps_to_look = self._look(groups)
            self.is_due = self._steps_to_look == 0

    def _look(self, groups: Groups) -> int:
        """Compares the counts before and after the first scheduled steps. Returns after how many steps to look again,
        or NEVER."""
        if self._pending is not None:
            arrived = self._pending.arrived()
            return 0 if arrived is None else self._warn_if_equal(*arrived)
        if not any(group["weight_decay"] or group["adamw_weight_decay"] for group in groups):
            return NEVER
        if any(group["adamw_weight_decay"] is not None for group in groups):  # these decay as AdamW's by intention
            return max(1, *(group["calibration_steps"] or 0 for group in groups))
        counts = self.counts()
        if self._before is None:
            self._before = counts
            return SCHEDULED_STEPS
        clipped, counted = (_difference(now, before) for now, before in zip(counts, self._before, strict=True))
        if not isinstance(clipped, Tensor) or not isinstance(counted, Tensor):
            return self._warn_if_equal(float(clipped), float(counted))
        if not can_be_read_later(clipped):
            return 1
        self._pending = HostCopy([clipped, counted])
        return 0

    def _warn_if_equal(self, clipped: float, counted: float) -> int:
        if 0 < counted == clipped:
            warn_user(
                f"All of the first {SCHEDULED_STEPS} scheduled steps were clipped to max_grad_norm="
                f"{self._options.max_grad_norm:g}. So the rms gradient of each is the same, the schedule is constant, "
                "and AdamS is AdamW with another weight_decay. Pass a max_grad_norm above the usual norms, which "
                'optimizer.grad_norm tells; or use decay="decoupled", which does the same as now directly.'
            )
        return NEVER

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Goes on counting: the share is that of all steps since the optimizer was made."""

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
        clipped, counted = self._on_device.unbind()
        clips = grad_norm > max_grad_norm
        if skip is None:
            clipped.add_(clips)
            counted.add_(1)
        else:
            is_taken = skip == 0
            clipped.add_(clips & is_taken)
            counted.add_(is_taken)

    def refuse_capture(self, step: Step) -> None:
        device = step.ranks.device
        if device.type != "cpu" and (self._on_device is None or self._on_device.device != device):
            raise RuntimeError(
                "FusedAdamS got the first step that clips in the capture of a CUDA graph, which would set the count of "
                "clipped steps back in each replay. Take such a step before, on a side stream."
            )

    def share(self) -> float:
        """Returns the share of clipped steps, NaN before the first. Waits for the device."""
        clipped, counted = map(int, self.counts())
        return clipped / counted if counted else math.nan

    def counts(self) -> Counts:
        """Returns the steps that clipped, and all that might have. Does not wait for the device."""
        clipped, counted = (0, 0) if self._on_device is None else self._on_device.unbind()
        return self._clipped + clipped, self._all + counted


def _difference(now: int | Tensor, before: int | Tensor) -> int | Tensor:
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        before = to_device(before, now.device)
    return now - before
