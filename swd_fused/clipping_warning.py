"""Warns, once, where clipping leaves nothing of the schedule, without making any step wait for its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from swd_fused.devices.transfer import HostCopy, can_be_read_later, to_device
from swd_fused.user_warning import warn_user

SCHEDULED_STEPS = 300
NEVER = -1

Counts = tuple[int | Tensor, int | Tensor]  # of clipped steps, and of all that might have been


class ClippingWarning:
    """Compares the counts before and after the first scheduled steps.

    If each of them was clipped, all had the same gradient norm, so the schedule divided by a constant. In between
    nobody is called: that would be noticed in small models.
    """

    def __init__(self) -> None:
        self._before: Counts | None = None
        self._pending: HostCopy | None = None

    def look(self, groups: Sequence[Mapping[str, Any]], counts: Counts, max_grad_norm: float | None) -> int:
        """Looks at the counts before a step. Returns after how many steps to look again, or NEVER."""
        if self._pending is not None:
            arrived = self._pending.arrived()
            return 0 if arrived is None else _warn_if_equal(arrived[0], arrived[1], max_grad_norm)
        if not any(group["weight_decay"] or group["adamw_weight_decay"] for group in groups):
            return NEVER
        if any(group["adamw_weight_decay"] is not None for group in groups):  # these decay as AdamW's by intention
            return max(1, *(group["calibration_steps"] or 0 for group in groups))
        if self._before is None:
            self._before = counts
            return SCHEDULED_STEPS
        clipped, counted = (_difference(now, before) for now, before in zip(counts, self._before, strict=True))
        if not isinstance(clipped, Tensor) or not isinstance(counted, Tensor):
            return _warn_if_equal(float(clipped), float(counted), max_grad_norm)
        if not can_be_read_later(clipped):
            return 1
        self._pending = HostCopy([clipped, counted])
        return 0


def _warn_if_equal(clipped: float, counted: float, max_grad_norm: float | None) -> int:
    if 0 < counted == clipped:
        warn_user(
            f"All of the first {SCHEDULED_STEPS} scheduled steps were clipped to max_grad_norm={max_grad_norm:g}. So "
            "the rms gradient of each is the same, the schedule is constant, and AdamS is AdamW with another "
            "weight_decay. Pass a max_grad_norm above the usual norms, which optimizer.grad_norm tells; or use "
            'decay="decoupled", which does the same as now directly.'
        )
    return NEVER


def _difference(now: int | Tensor, before: int | Tensor) -> int | Tensor:
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        before = to_device(before, now.device)
    return now - before
