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

from torch import Tensor

from swd_fused.checks import Check, is_whole
from swd_fused.decay.kinds import ADAMW_WEIGHT_DECAY, Decay, check_is_scheduled, divisor
from swd_fused.devices.transfer import is_fake

if TYPE_CHECKING:
    from swd_fused.core.step import Step

CALIBRATION_STEPS = 100
SOME_STEPS = Check(lambda steps: is_whole(steps, 1), "a whole number > 0", "The warm-up is a good choice.")

Groups = Sequence[dict[str, Any]]


class Calibration:
    """Counts the steps of calibration, and lets the schedule take over when they have been taken."""

    needs_small_mean = False

    def __init__(self) -> None:
        self.is_due = False
        self._mean: Tensor | None = None  # the last step's
        # By id of the group: how many of the steps that were counted were skipped, where only the device knows. They
        # count as taken until the host waits for the device: when calibration seems to be at its end, or is saved.
        self._skipped: dict[int, Tensor] = {}

    def restart(self, entries: object, is_fresh: bool) -> None:
        self.__init__()  # type: ignore[misc]

    def concerns(self, groups: Groups, options: Any) -> bool:
        return options.decay == "scheduled" and any(group["adamw_weight_decay"] is not None for group in groups)

    def note(self, step: Step) -> None:
        """Counts a step that was taken. One in several calls counts once."""
        self._mean = step.results[0]
        if not step.is_continued:
            skip = step.skip
            for group in step.groups:
                if group["calibration_steps"]:
                    group["calibration_steps"] -= 1
                    if skip is not None:
                        self._skipped[id(group)] = self._skipped.get(id(group), 0) + skip
            if skip is not None and skip.is_cpu and not is_fake(skip):
                self.take_back_skipped(step.groups)
        calibrated = [group for group in step.groups if group["adamw_weight_decay"] is not None]
        self.is_due = any(not group["calibration_steps"] for group in calibrated)

    def take_back_skipped(self, groups: Groups) -> None:
        """Takes back what was counted of skipped steps. May wait for the device."""
        for group in groups:
            skipped = self._skipped.pop(id(group), None)
            if skipped is not None:
                group["calibration_steps"] += int(skipped)

    def speak(self, groups: Groups) -> None:
        """Lets the schedule take over in groups that have taken their last step of calibration.

        Waits for a step with a usable mean: that of zero gradients, or of bad ones, says nothing.
        """
        for group in groups:
            if group["adamw_weight_decay"] is None or group["calibration_steps"]:
                continue
            self.take_back_skipped([group])
            if group["calibration_steps"]:
                continue
            mean = math.nan if self._mean is None else float(self._mean)
            if group["weight_decay"] == 0:
                group["adamw_weight_decay"] = None
            elif 0 < mean < math.inf:
                group["weight_decay"] = group["adamw_weight_decay"] * divisor(mean, group["eps"])
                group["adamw_weight_decay"] = None

    def settle(self, groups: Groups) -> None:
        """Brings groups to where a resumed run could not bring them: which steps were skipped, and the mean at the end
        of calibration, are not saved. May wait for the device."""
        self.take_back_skipped(groups)
        self.speak(groups)

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
            raise ValueError(
                f"FusedAdamS got calibration_steps={steps!r} without adamw_weight_decay, which needs them."
            )
        return {"adamw_weight_decay": None, "calibration_steps": 0}
    check_is_scheduled(weight_decay, kind)
    ADAMW_WEIGHT_DECAY.require("adamw_weight_decay", weight_decay)
    steps = CALIBRATION_STEPS if steps is None else steps
    SOME_STEPS.require("calibration_steps", steps)
    return {"adamw_weight_decay": weight_decay, "calibration_steps": steps}


def check_some_group_decays(adamw_weight_decay: float | None, groups: Sequence[Mapping[str, Any]]) -> None:
    if adamw_weight_decay and not any(group["adamw_weight_decay"] for group in groups):
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={adamw_weight_decay!r}, but all parameter groups have weight_decay=0 "
            "and so do not decay. Leave weight_decay out of the groups that should (in Hugging Face's "
            "TrainingArguments give it the same value as adamw_weight_decay)."
        )


def match_adamw(weight_decay: float, kind: Decay, groups: Groups) -> None:
    """Makes groups that decay take one step of calibration."""
    if kind != "scheduled":
        raise ValueError(
            f"match_adamw is for the schedule, but this optimizer has decay={kind!r}. Set weight_decay instead."
        )
    ADAMW_WEIGHT_DECAY.require("match_adamw(weight_decay)", weight_decay)
    decaying = [group for group in groups if group["weight_decay"] > 0]
    if weight_decay > 0 and not decaying:
        raise ValueError(
            f"match_adamw got weight_decay={weight_decay!r}, but all parameter groups have weight_decay=0, and it "
            "changes only groups that decay. Give those that should decay a weight_decay > 0 first, of any size."
        )
    for group in decaying:
        group["adamw_weight_decay"], group["calibration_steps"] = weight_decay, 1
