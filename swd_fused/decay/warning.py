"""Warns, once, of a weight decay that was meant for AdamW, without making any step wait for its device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from swd_fused.decay.kinds import FAR_BEYOND_ADAMW, SO_FAR, columns, divisor
from swd_fused.devices.transfer import HostCopy, can_be_read_later, is_fake
from swd_fused.observer import Groups, Observer
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.step import Step

# Only early in training: at its end gradients become small, and a decay that grows is the method.
EARLY_STEPS = 100

# How often to look at a device's mean after that. Each look takes the host as long as launching a kernel.
STEPS_BETWEEN = 50

# Entries of groups that may be tensors, whose numbers are read together with the mean.
LRS = ("lr", SO_FAR)

ADVICE = (
    "FusedAdamS divides weight_decay by the rms gradient, so values made for AdamW are far too large: pass those as "
    "adamw_weight_decay=... instead, matched over enough calibration_steps, for instance the warm-up."
)


class DecayWarning(Observer):
    """Looks at each step's mean until it has warned.

    The warning comes with the next step, before that changes anything: users may have turned warnings into errors, and
    an error must leave parameters and state as they were. From a GPU the mean may come later still.
    """

    needs_small_mean = True

    def __init__(self) -> None:
        self._start(early_steps=0)

    def _start(self, early_steps: int) -> None:
        self.is_due = self._is_done = False
        self._early_steps = early_steps  # the first steps of training, if they are among those to come
        self._message: str | None = None
        self._pending: tuple[HostCopy, list[dict[str, Any]], bool] | None = None

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Starts looking anew. `is_fresh` is whether training begins here, so that the first steps are early ones."""
        self._start(EARLY_STEPS if is_fresh else 0)

    def concerns(self, groups: Groups, options: Any) -> bool:
        return not self._is_done and options.decay == "scheduled"

    def note(self, step: Step) -> None:
        """Takes up the mean of a step that has been taken, and the groups that it was used for."""
        mean, number = step.results[0], step.number
        if self._is_done or self.is_due or is_fake(mean):
            return
        is_early = number <= self._early_steps
        groups = [{key: value for key, value in group.items() if key != "params"} for group in step.groups]
        tensors = [group[key] for group in groups for key in LRS if isinstance(group.get(key), Tensor)]
        if mean.is_cpu:
            self._message = _message_on([float(value) for value in (mean, *tensors)], groups, is_early)
            self.is_due = self._message is not None
        elif (is_early or number % STEPS_BETWEEN == 0) and can_be_read_later(mean):
            self._pending = HostCopy([mean, *tensors]), groups, is_early
            self.is_due = True

    def speak(self, groups: Groups) -> None:
        """Warns of what earlier steps have shown."""
        if self._pending is not None:
            copy, of_groups, is_early = self._pending
            values = copy.arrived()
            if values is not None:
                self._pending = None
                self._message = _message_on(values, of_groups, is_early)
                self.is_due = self._message is not None
        if self._message is not None:
            message, self._message, self.is_due, self._is_done = self._message, None, False, True
            warn_user(message)


def _message_on(values: list[float], groups: list[dict[str, Any]], is_early: bool) -> str | None:
    """Returns the warning, if there is one. `values` are the mean, and what is a tensor in the groups."""
    exp_avg_sq_mean, *rest = values
    if not exp_avg_sq_mean > 0:
        return None
    rms, numbers = math.sqrt(exp_avg_sq_mean), iter(rest)
    for index, group in enumerate(groups):
        group = {**group, **{key: next(numbers) for key in LRS if isinstance(group.get(key), Tensor)}}
        lr = max(0.0, group["lr"])
        found = columns(group, lr)
        weight_decay, max_decay = found["weight_decay"], found["max_decay"]
        shrink = found["decay_lr"] * weight_decay / divisor(exp_avg_sq_mean, group["eps"])
        scheduled = shrink / lr if lr else 0.0
        acts_like = f"at an rms gradient of {rms:.2g} weight_decay={weight_decay:g} acts like {scheduled:.3g} in AdamW"
        if shrink > max_decay:
            larger = " If so large a decay is meant, pass a larger max_decay=, up to 1." if max_decay < 1 else ""
            return (
                f"max_decay={max_decay:g} binds in parameter group {index}: {acts_like} and would remove "
                f"{100 * shrink:.3g}% of each weight in one step. {ADVICE}{larger}"
            )
        if is_early and lr > 0 and scheduled > FAR_BEYOND_ADAMW:
            return (
                f"The weight decay of parameter group {index} is far beyond what is used with AdamW, 0.01 to 0.3: "
                f"{acts_like}. {ADVICE} Or use weight_decay={0.1 * rms:.1g}, which acts like 0.1 now."
            )
    return None
