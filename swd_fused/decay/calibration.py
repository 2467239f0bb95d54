"""Lets the schedule start from AdamW's weight decay.

A group whose `adamw_weight_decay` is not None decays as AdamW's would with that value; or, as long as its
`weight_decay` is 0, not at all. When its `calibration_steps` have been taken, `weight_decay` is set so that the
schedule would have decayed as much in the last of them, and the schedule takes over. Both are entries of the group, so
they are saved and loaded with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.checks import Check, is_whole
from swd_fused.decay.kinds import ADAMW_WEIGHT_DECAY, Decay, check_is_scheduled, divisor
from swd_fused.observer import Groups, Observer

if TYPE_CHECKING:
    from swd_fused.core.step import Step

CALIBRATION_STEPS = 100
SOME_STEPS = Check(lambda steps: is_whole(steps, 1), "a whole number > 0", "The warm-up is a good choice.")


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


# --- The two entries of a group


def calibration_of(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the two entries of a new group: its own, none where it does not decay, or the optimizer's."""
    kind: Decay = defaults["decay"]
    decays = group.get("weight_decay", defaults["weight_decay"]) != 0
    if "adamw_weight_decay" in group:
        if group["adamw_weight_decay"] and not decays:
            raise ValueError(
                f"FusedAdamS got a parameter group with adamw_weight_decay={group['adamw_weight_decay']!r}, but with "
                "weight_decay=0, which makes it decay not at all. Use one of the two."
            )
        steps = group.get("calibration_steps", defaults["calibration_steps"] or None)
        return checked_calibration(group["adamw_weight_decay"], steps, kind)
    return {} if decays else checked_calibration(None, None, kind)


def checked_calibration(weight_decay: float | None, steps: int | None, kind: Decay) -> dict[str, Any]:
    """Returns `adamw_weight_decay` and `calibration_steps` as a group has them."""
    if weight_decay is None:
        if steps:
            raise ValueError(f"FusedAdamS got calibration_steps={steps!r} without adamw_weight_decay, wanted both.")
        return {"adamw_weight_decay": None, "calibration_steps": 0}
    check_is_scheduled(weight_decay, kind)
    ADAMW_WEIGHT_DECAY.require("adamw_weight_decay", weight_decay)
    steps = CALIBRATION_STEPS if steps is None else steps
    SOME_STEPS.require("calibration_steps", steps)
    return {"adamw_weight_decay": weight_decay, "calibration_steps": steps}


def check_some_group_decays(adamw_weight_decay: float | None, groups: Sequence[Mapping[str, Any]]) -> None:
    if adamw_weight_decay and not any(group["adamw_weight_decay"] for group in groups):
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={adamw_weight_decay!r}, but all parameter groups have weight_decay=0. "
            "Leave weight_decay out of the groups that should decay (in Hugging Face's TrainingArguments give it the "
            "same value as adamw_weight_decay)."
        )


def match_adamw(weight_decay: float, kind: Decay, groups: Groups) -> None:
    """Makes groups that decay take one step of calibration."""
    if kind != "scheduled":
        raise ValueError(f"match_adamw got decay={kind!r}, wanted the schedule's. Set weight_decay instead.")
    ADAMW_WEIGHT_DECAY.require("match_adamw(weight_decay)", weight_decay)
    decaying = [group for group in groups if group["weight_decay"] > 0]
    if weight_decay > 0 and not decaying:
        raise ValueError(
            f"match_adamw got weight_decay={weight_decay!r}, but all parameter groups have weight_decay=0. Give those "
            "that should decay a weight_decay > 0 first, of any size."
        )
    for group in decaying:
        group["adamw_weight_decay"], group["calibration_steps"] = weight_decay, 1
