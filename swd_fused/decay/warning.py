"""Warns, once, of a weight decay that was meant for AdamW, without making any step wait for its device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.decay.kinds import FAR_BEYOND_ADAMW, divisor
from swd_fused.devices.transfer import HostCopy, can_be_read_later, is_fake
from swd_fused.observer import Groups, Observer
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.step import Step

# Only early in training: at its end gradients become small, and a decay that grows is the method.
EARLY_STEPS = 100

# How often to look at a device's mean after that. Each look takes the host as long as launching a kernel.
STEPS_BETWEEN = 50

# Of the table of hyper-parameters, which has learning rates that are tensors as numbers.
COLUMNS = ("lr", "decay_lr", "eps", "weight_decay", "max_decay")


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
        self._pending: tuple[HostCopy, bool] | None = None  # the numbers on their way, and whether the step is early

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Starts looking anew. `is_fresh` is whether training begins here, so that the first steps are early ones."""
        self._start(EARLY_STEPS if is_fresh else 0)

    def concerns(self, groups: Groups, options: Any) -> bool:
        return not self._is_done and options.decay == "scheduled"

    def note(self, step: Step) -> None:
        """Takes up the mean of a step that has been taken, and the hyper-parameters that it was used with."""
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
        """Warns of what earlier steps have shown."""
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
    """Returns what decides about a step's decay, with a row for each group, where the mean is."""
    hyper = step.values.on(step.results[0].device)
    return torch.stack([hyper.column(name) for name in COLUMNS], 1)


def _message_on(values: list[float], is_early: bool) -> str | None:
    """Returns the warning, if there is one. `values` are the mean, and the columns of each group."""
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
