"""Weight decay in AdamW's terms: what the schedule acts like, and how to make it start from AdamW's value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from swd_fused import schedule
from swd_fused.clipped_steps import ClippedSteps
from swd_fused.options import Decay, Options, is_number, message
from swd_fused.schedule import Hyper, hyper_rows

CALIBRATION_STEPS = 100


class InAdamWTerms(Optimizer):
    """The part of FusedAdamS that translates between its own weight decay and AdamW's.

    A group whose `adamw_weight_decay` is not None decays as AdamW's would with that value. When its `calibration_steps`
    have been taken, `weight_decay` is set so that the schedule would have decayed as much in the last of them, and the
    schedule takes over. Both are entries of the group, so they are saved and loaded with it.
    """

    param_groups: list[dict[str, Any]]
    exp_avg_sq_mean: Tensor
    grad_norm: Tensor
    skipped_steps: Tensor
    max_grad_norm: float | None
    _clipped_steps: ClippedSteps
    options: Options

    def effective_weight_decay(self) -> list[float]:
        """Returns for each group the `weight_decay` with which AdamW would shrink the weights as much as this does now.

        At the mean of the last step, NaN before the first. Waits for the device.
        """
        self._end_calibration()
        hyper = Hyper(hyper_rows(self.param_groups, self.options.decay), self.exp_avg_sq_mean.device)
        hyper.set_tensor_lrs(self.param_groups)
        decay = schedule.effective_weight_decay(self.exp_avg_sq_mean, hyper)
        return torch.where(self.exp_avg_sq_mean.isnan(), self.exp_avg_sq_mean, decay).tolist()

    def metrics(self) -> dict[str, float]:
        """Returns what is worth logging of the last step. Waits for the device.

        `grad_norm` is that before clipping, `rms_grad` the root of the schedule's mean, and
        `effective_weight_decay/<group>` AdamW's weight decay that would shrink as much, by the group's `name` or index.
        `skipped_steps` and, where `max_grad_norm` is set, `clipped_share` are of all steps since this optimizer was
        made: near 1 clipping makes the decay constant.
        """
        decays = zip(self.param_groups, self.effective_weight_decay(), strict=True)
        clipped = {} if self.max_grad_norm is None else {"clipped_share": self._clipped_steps.share()}
        return {
            "grad_norm": float(self.grad_norm),
            "rms_grad": float(self.exp_avg_sq_mean.sqrt()),
            **{
                f"effective_weight_decay/{group.get('name', index)}": decay
                for index, (group, decay) in enumerate(decays)
            },
            **clipped,
            "skipped_steps": float(self.skipped_steps),
        }

    def match_adamw(self, weight_decay: float) -> None:
        """Makes the next step decay as AdamW with this `weight_decay` would; from there on the schedule takes over.

        Sets the weight decay of each group that decays at all. The step after the next waits for the device, once.
        """
        check_match_adamw(weight_decay, self.options.decay, self.param_groups)
        for group in self.param_groups:
            if group["weight_decay"] > 0:
                group["adamw_weight_decay"], group["calibration_steps"] = weight_decay, 1

    def _calibration_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the two entries of a new group: its own, none where it does not decay, or the optimizer's."""
        if "adamw_weight_decay" in group:
            steps = group.get("calibration_steps", self.defaults["calibration_steps"] or None)
            return checked_calibration(group["adamw_weight_decay"], steps, self.options.decay)
        if group.get("weight_decay") == 0:
            return checked_calibration(None, None, self.options.decay)
        return {}

    def _count_calibration_step(self) -> None:
        for group in self.param_groups:
            if group["calibration_steps"]:
                group["calibration_steps"] -= 1

    def _end_calibration(self) -> None:
        """Lets the schedule take over in groups that have taken their last step of calibration.

        Waits for a step with a usable mean: that of zero gradients, or of bad ones, says nothing.
        """
        for group in self.param_groups:
            if group["adamw_weight_decay"] is None or group["calibration_steps"]:
                continue
            mean = float(self.exp_avg_sq_mean)
            if 0 < mean < math.inf:
                group["weight_decay"] = group["adamw_weight_decay"] * (math.sqrt(mean) + group["eps"])
                group["adamw_weight_decay"] = None


def checked_calibration(weight_decay: float | None, steps: int | None, decay: Decay) -> dict[str, Any]:
    """Returns `adamw_weight_decay` and `calibration_steps` as a group has them."""
    if weight_decay is None:
        if steps:
            raise ValueError(
                f"FusedAdamS got calibration_steps={steps!r} without adamw_weight_decay, which needs them."
            )
        return {"adamw_weight_decay": None, "calibration_steps": 0}
    if decay != "scheduled":
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={weight_decay!r} with decay={decay!r}, which is AdamW's or Adam's own. "
            "Use weight_decay."
        )
    if not (is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(message("adamw_weight_decay", weight_decay, "a finite number >= 0, as AdamW takes it"))
    steps = CALIBRATION_STEPS if steps is None else steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(message("calibration_steps", steps, "a whole number > 0", "The warm-up is a good choice."))
    return {"adamw_weight_decay": weight_decay, "calibration_steps": steps}


def check_some_group_decays(adamw_weight_decay: float | None, groups: Sequence[Mapping[str, Any]]) -> None:
    if adamw_weight_decay and not any(group["adamw_weight_decay"] for group in groups):
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={adamw_weight_decay!r}, but all parameter groups have weight_decay=0 "
            "and so do not decay. Leave weight_decay out of the groups that should (in Hugging Face's "
            "TrainingArguments give it the same value as adamw_weight_decay)."
        )


def check_match_adamw(weight_decay: float, decay: Decay, groups: Sequence[Mapping[str, Any]]) -> None:
    if decay != "scheduled":
        raise ValueError(
            f"match_adamw is for the schedule, but this optimizer has decay={decay!r}. Set weight_decay instead."
        )
    if not (is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(message("match_adamw(weight_decay)", weight_decay, "a finite number >= 0, as AdamW takes it"))
    if weight_decay > 0 and not any(group["weight_decay"] > 0 for group in groups):
        raise ValueError(
            f"match_adamw got weight_decay={weight_decay!r}, but all parameter groups have weight_decay=0, and it "
            "changes only groups that decay. Give those that should decay a weight_decay > 0 first, of any size."
        )
