"""Lets the schedule start from AdamW's weight decay.

A group whose `adamw_weight_decay` is not None decays as AdamW's would with that value; or, as long as its
`weight_decay` is 0, not at all. When its `calibration_steps` have been taken, `weight_decay` is set so that the
schedule would have decayed as much in the last of them, and the schedule takes over. Both are entries of the group, so
they are saved and loaded with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.decay.kinds import divisor
from swd_fused.observer import Groups, Observer

if TYPE_CHECKING:
    from swd_fused.core.step import Step

CALIBRATION_STEPS = 100


class Calibration(Observer):
    """Counts the steps of calibration, and lets the schedule take over when they have been taken."""

    def __init__(self) -> None:
        self._mean: Tensor | None = None  # the last step's

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        self._mean, self.is_due = None, False

    def concerns(self, groups: Groups, options: Any) -> bool:
        return options.decay == "scheduled" and any(group["adamw_weight_decay"] is not None for group in groups)

    def note(self, step: Step) -> None:
        """Counts a step, which may have been skipped. One in several calls counts once."""
        mean = step.results[0]
        self._mean = mean if step.skip is None else torch.where(step.skip == 0, mean, math.nan)
        calibrated = [group for group in step.groups if group["adamw_weight_decay"] is not None]
        if not step.is_continued:
            for group in calibrated:
                group["calibration_steps"] = max(0, group["calibration_steps"] - 1)
        self.is_due = any(not group["calibration_steps"] for group in calibrated)

    def speak(self, groups: Groups) -> None:
        """Lets the schedule take over in groups that have taken their last step of calibration. Waits for the device.

        Waits for a step with a usable mean: that of zero gradients, or of bad ones, says nothing. The mean is not
        saved, so this is called before groups are.
        """
        done = [g for g in groups if g["adamw_weight_decay"] is not None and not g["calibration_steps"]]
        if not done:
            return
        mean = math.nan if self._mean is None else float(self._mean)
        for group in done:
            if group["weight_decay"] == 0:
                group["adamw_weight_decay"] = None
            elif 0 < mean < math.inf:
                group["weight_decay"] = group["adamw_weight_decay"] * divisor(mean, group["eps"])
                group["adamw_weight_decay"] = None

    def refuse_capture(self, step: Step) -> None:
        raise RuntimeError(
            "FusedAdamS got a step in the capture of a CUDA graph while weight decay is still matched to AdamW's, "
            "which replays could not bring to an end. Take calibration_steps and one more step before."
        )


def calibration_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the two entries of a new group, given all that it has: none where it does not decay."""
    if group["adamw_weight_decay"] is None or group["weight_decay"] == 0:
        return {"adamw_weight_decay": None, "calibration_steps": 0}
    return {"calibration_steps": group["calibration_steps"] or CALIBRATION_STEPS}
