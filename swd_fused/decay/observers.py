"""The observers of the decay: calibration to AdamW's value, and the warning of a value that was meant for AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.decay.kinds import FAR_BEYOND_ADAMW, divisor
from swd_fused.devices.transfer import HostCopy, can_be_read_later, is_fake
from swd_fused.observer import Groups, Observer
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.step import Step

CALIBRATION_STEPS = 100

# How many steps are early. Later, gradients become small, and a growing decay is what the method intends.
EARLY_STEPS = 100

# After the early steps, the interval between copies of a device's mean. A copy costs the host a kernel launch.
STEPS_BETWEEN = 50

# Columns of the table of hyper-parameters, where learning rates that are tensors are numbers.
COLUMNS = ("lr", "decay_lr", "eps", "weight_decay", "max_decay")


class Calibration(Observer):
    """Starts the schedule from AdamW's weight decay.

    A group whose `adamw_weight_decay` is not None decays as AdamW would with that value, or not at all while its
    `weight_decay` is 0. When its `calibration_steps` have been taken, `weight_decay` is set so that the schedule would
    have decayed as much in the last of them, and the schedule takes over. Both options are entries of the group, so
    they are saved and loaded with it.
    """

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        self._mean: Tensor | None = None  # the last step's
        self.is_due = False

    def concerns(self, groups: Groups, options: Any) -> bool:
        return options.decay == "scheduled" and any(group["adamw_weight_decay"] is not None for group in groups)

    def note(self, step: Step) -> None:
        """Counts a step, even if it was skipped. A step that takes several calls counts once."""
        mean = step.results[0]
        self._mean = mean if step.skip is None else torch.where(step.skip == 0, mean, math.nan)
        calibrated = [group for group in step.groups if group["adamw_weight_decay"] is not None]
        if not step.is_continued:
            for group in calibrated:
                group["calibration_steps"] = max(0, group["calibration_steps"] - 1)
        self.is_due = any(not group["calibration_steps"] for group in calibrated)

    def speak(self, groups: Groups) -> None:
        """Switches groups that have taken their last step of calibration to the schedule. Waits for the device.

        A group is switched after a step with a usable mean, which zero gradients or bad ones do not give. The mean is
        not saved, so this must be called before groups are saved.
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
    """Returns a new group's entries for calibration, given all its options. A group that does not decay has none."""
    if group["adamw_weight_decay"] is None or group["weight_decay"] == 0:
        return {"adamw_weight_decay": None, "calibration_steps": 0}
    return {"calibration_steps": group["calibration_steps"] or CALIBRATION_STEPS}


class DecayWarning(Observer):
    """Warns, once, of a weight decay that was meant for AdamW, without making any step wait for its device.

    The warning comes at the start of the next step, before anything changes: users may have turned warnings into
    errors, and an error must leave parameters and state as they were. From a GPU the mean may arrive even later.
    """

    needs_small_mean, needs_all_steps = True, False

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Starts anew. `is_fresh` says that training begins here, so that the first steps count as early."""
        self.is_due = self._is_done = False
        self._early_steps = EARLY_STEPS if is_fresh else 0
        self._message: str | None = None
        self._pending: tuple[HostCopy, bool] | None = None  # numbers being copied, and whether the step is early

    def concerns(self, groups: Groups, options: Any) -> bool:
        return not self._is_done and options.decay == "scheduled"

    def note(self, step: Step) -> None:
        """Takes up the mean of a step, and the hyper-parameters of that step."""
        mean, number = step.results[0], step.number
        if self._is_done or self.is_due or is_fake(mean):
            return
        is_early = number <= self._early_steps
        if mean.is_cpu:
            self._message = _message_on([float(mean), *_columns(step).flatten().tolist()], is_early)
            self.is_due = self._message is not None
        elif (is_early or number % STEPS_BETWEEN == 0) and can_be_read_later(mean):
            self._pending = HostCopy([mean, _columns(step)]), is_early
            self.is_due = True

    def speak(self, groups: Groups) -> None:
        """Warns if the numbers of an earlier step call for it."""
        if self._pending is not None:
            copy, is_early = self._pending
            values = copy.arrived()
            if values is not None:
                self._pending = None
                self._message = _message_on(values, is_early)
                self.is_due = self._message is not None
        if self._message is not None:
            message, self._message, self.is_due, self._is_done = self._message, None, False, True
            warn_user(message)


def _columns(step: Step) -> Tensor:
    """Returns `COLUMNS` of the hyper-parameters on the mean's device, with a row for each group."""
    hyper = step.values.on(step.results[0].device)
    return torch.stack([hyper.column(name) for name in COLUMNS], 1)


def _message_on(values: list[float], is_early: bool) -> str | None:
    """Returns the warning, or None. `values` are the mean, and the columns of each group."""
    exp_avg_sq_mean, *columns = values
    if not exp_avg_sq_mean > 0:
        return None
    rms = math.sqrt(exp_avg_sq_mean)
    for index in range(len(columns) // len(COLUMNS)):
        lr, decay_lr, eps, weight_decay, max_decay = columns[index * len(COLUMNS) :][: len(COLUMNS)]
        shrink = decay_lr * weight_decay / divisor(exp_avg_sq_mean, eps)
        acts_like = shrink / lr if lr else 0.0
        if shrink > max_decay or (is_early and acts_like > FAR_BEYOND_ADAMW):
            return (
                f"weight_decay={weight_decay:g} of parameter group {index} acts like {acts_like:.3g} in AdamW, where "
                f"0.01 to 0.3 is usual. At an rms gradient of {rms:.2g} it would remove {100 * shrink:.3g}% of each "
                f"weight in one step, and max_decay={max_decay:g} allows {100 * max_decay:g}%. FusedAdamS divides "
                "weight_decay by the rms gradient: pass AdamW's value as adamw_weight_decay, with calibration_steps as "
                f"long as the warm-up; or use weight_decay={0.1 * rms:.1g}, which acts like 0.1 now. If so much is "
                "meant, pass a larger max_decay."
            )
    return None
