"""Translates between the schedule's weight decay and AdamW's, and makes the schedule start from AdamW's value.

A group whose `adamw_weight_decay` is not None decays as AdamW's would with that value; or, as long as its
`weight_decay` is 0, not at all. When its `calibration_steps` have been taken, `weight_decay` is set so that the
schedule would have decayed as much in the last of them, and the schedule takes over. Both are entries of the group, so
they are saved and loaded with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.checks import Check, is_whole
from swd_fused.options import ADAMW_WEIGHT_DECAY, Decay
from swd_fused.step.decay_warning import CALIBRATED_ADVICE, DecayWarning
from swd_fused.tensors.group_checks import check_is_scheduled
from swd_fused.tensors.hyper import GroupValues
from swd_fused.tensors.largest_lr import correction, note_larger
from swd_fused.tensors.transfer import is_fake

CALIBRATION_STEPS = 100
SOME_STEPS = Check(lambda steps: is_whole(steps, 1), "a whole number > 0", "The warm-up is a good choice.")


class Calibration:
    """Counts the steps of calibration, and lets the schedule take over when they have been taken."""

    def __init__(self) -> None:
        self._skips_before: dict[int, Tensor] = {}  # by id of the group: skipped steps when its were first counted

    def count(self, groups: Sequence[dict[str, Any]], skip: Tensor | None, skipped_steps: Tensor) -> None:
        """Counts a step that was taken, or skipped where `skip` is not 0. `skipped_steps` are those so far.

        Where only the device knows, the step counts as taken until the host waits for the device: when calibration
        seems to be at its end, or is saved.
        """
        calibrated = [group for group in groups if group["calibration_steps"]]
        for group in calibrated:
            group["calibration_steps"] -= 1
            if skip is not None and id(group) not in self._skips_before:
                self._skips_before[id(group)] = skipped_steps - skip
        if skip is not None and skip.is_cpu and not is_fake(skip):
            self.take_back_skipped(calibrated, skipped_steps)

    def take_back_skipped(self, groups: Sequence[dict[str, Any]], skipped_steps: Tensor) -> None:
        """Takes back what was counted of skipped steps. May wait for the device."""
        for group in groups:
            before = self._skips_before.pop(id(group), None)
            if before is not None:
                group["calibration_steps"] += int(skipped_steps) - int(before)

    def end(self, groups: Sequence[dict[str, Any]], exp_avg_sq_mean: Tensor, skipped_steps: Tensor) -> bool:
        """Lets the schedule take over in groups that have taken their last step of calibration. Returns whether any
        group has changed.

        Waits for a step with a usable mean: that of zero gradients, or of bad ones, says nothing.
        """
        has_changed = False
        for group in groups:
            if group["adamw_weight_decay"] is None or group["calibration_steps"]:
                continue
            self.take_back_skipped([group], skipped_steps)
            if group["calibration_steps"]:
                has_changed = True
                continue
            if group["weight_decay"] == 0:
                group["adamw_weight_decay"] = None
                has_changed = True
                continue
            mean = float(exp_avg_sq_mean)
            if 0 < mean < math.inf:
                group["weight_decay"] = group["adamw_weight_decay"] * (math.sqrt(mean) + group["eps"])
                group["adamw_weight_decay"] = None
                has_changed = True
        return has_changed


def calibration_of(group: Mapping[str, Any], defaults: Mapping[str, Any], decay: Decay) -> dict[str, Any]:
    """Returns the two entries of a new group: its own, none where it does not decay, or the optimizer's."""
    decays = group.get("weight_decay", defaults["weight_decay"]) != 0
    if "adamw_weight_decay" in group:
        if group["adamw_weight_decay"] and not decays:
            raise ValueError(
                f"FusedAdamS got a parameter group with adamw_weight_decay={group['adamw_weight_decay']!r}, but with "
                "weight_decay=0, which makes it decay not at all. Use one of the two."
            )
        steps = group.get("calibration_steps", defaults["calibration_steps"] or None)
        return checked_calibration(group["adamw_weight_decay"], steps, decay)
    return {} if decays else checked_calibration(None, None, decay)


def choose_advice(warning: DecayWarning, *entries: Mapping[str, Any]) -> None:
    """Has a warning tell those who have asked for a decay in AdamW's terms something else than to do so."""
    if any(group.get("adamw_weight_decay") is not None for group in entries):
        warning.advice = CALIBRATED_ADVICE


def effective_weight_decay(groups: Sequence[dict[str, Any]], decay: Decay, exp_avg_sq_mean: Tensor) -> list[float]:
    """Returns for each group the `weight_decay` with which AdamW would shrink the weights as much. Waits for the
    device."""
    note_larger(groups)
    hyper = GroupValues(groups, decay, of_step=False).on(exp_avg_sq_mean.device)
    corrections = hyper.table.new_tensor([correction(group, decay) for group in groups])
    in_adamw = schedule.effective_weight_decay(exp_avg_sq_mean, hyper, corrections)
    return torch.where(exp_avg_sq_mean.isnan(), exp_avg_sq_mean, in_adamw).tolist()


def checked_calibration(weight_decay: float | None, steps: int | None, decay: Decay) -> dict[str, Any]:
    """Returns `adamw_weight_decay` and `calibration_steps` as a group has them."""
    if weight_decay is None:
        if steps:
            raise ValueError(
                f"FusedAdamS got calibration_steps={steps!r} without adamw_weight_decay, which needs them."
            )
        return {"adamw_weight_decay": None, "calibration_steps": 0}
    check_is_scheduled(weight_decay, decay)
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


def match_adamw(weight_decay: float, decay: Decay, groups: Sequence[dict[str, Any]]) -> None:
    """Has groups that decay take one step of calibration."""
    if decay != "scheduled":
        raise ValueError(
            f"match_adamw is for the schedule, but this optimizer has decay={decay!r}. Set weight_decay instead."
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
