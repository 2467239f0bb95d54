"""Warns, once, of a weight decay that was meant for AdamW, without making any step wait for its device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from swd_fused.tensors.hyper import FAR_BEYOND_ADAMW
from swd_fused.tensors.largest_lr import SO_FAR
from swd_fused.tensors.transfer import HostCopy, can_be_read_later, is_fake
from swd_fused.user_warning import warn_user

# Only early in training: at its end gradients become small, and a decay that grows is the method.
EARLY_STEPS = 100

# Of looks at a device's mean after that. Each takes the host as long as launching a kernel.
STEPS_BETWEEN = 50

ADVICE = (
    "FusedAdamS divides weight_decay by the rms gradient, so values made for AdamW are far too large: pass those as "
    "adamw_weight_decay=... instead, or to optimizer.match_adamw(weight_decay=...)."
)


CALIBRATED_ADVICE = (
    "It was matched to adamw_weight_decay when gradients were larger. Matched over more steps, with a larger "
    "calibration_steps, for instance the warm-up, it is smaller."
)


class GroupDecay(NamedTuple):
    lr: float | Tensor  # which is read with the mean, and so is the next
    largest_lr: float | Tensor  # of corrected decay; else 0
    weight_decay: float
    eps: float
    max_decay: float


class DecayWarning:
    """Looks at each step's mean until it has warned.

    The warning comes with the next step, before that changes anything: users may have turned warnings into errors, and
    an error must leave parameters and state as they were. From a GPU the mean may come later still.
    """

    def __init__(self, advice: str = ADVICE, is_fresh: bool = False) -> None:
        """`is_fresh` is whether training begins here, so that the first steps are early ones."""
        self.advice = advice
        self.early_steps_left = EARLY_STEPS if is_fresh else 0
        self.is_done = False
        self._message: str | None = None
        self.is_due = False  # whether `warn` may have something to say
        self._pending: tuple[HostCopy, list[GroupDecay], bool] | None = None

    def note(self, exp_avg_sq_mean: Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes up the mean of a step that has been taken."""
        if self.is_done or self.is_due or is_fake(exp_avg_sq_mean):
            return
        is_early, self.early_steps_left = self.early_steps_left > 0, self.early_steps_left - 1
        decays = [_decay_of(group) for group in groups]
        tensor_lrs = [lr for decay in decays for lr in decay[:2] if isinstance(lr, Tensor)]
        if exp_avg_sq_mean.is_cpu:
            self._message = self._bound([float(value) for value in (exp_avg_sq_mean, *tensor_lrs)], decays, is_early)
            self.is_due = self._message is not None
        elif (is_early or self.early_steps_left % STEPS_BETWEEN == 0) and can_be_read_later(exp_avg_sq_mean):
            self._pending = HostCopy([exp_avg_sq_mean, *tensor_lrs]), decays, is_early
            self.is_due = True

    def warn(self) -> None:
        """Warns of what earlier steps have shown. To be called before a step changes anything."""
        if self._pending is not None:
            copy, decays, is_early = self._pending
            values = copy.arrived()
            if values is not None:
                self._pending = None
                self._message = self._bound(values, decays, is_early)
                self.is_due = self._message is not None
        if self._message is not None:
            message, self._message, self.is_due, self.is_done = self._message, None, False, True
            warn_user(message)

    def _bound(self, values: list[float], decays: list[GroupDecay], is_early: bool) -> str | None:
        """Returns the warning, if there is one. `values` are the mean and what is a tensor of the decays."""
        exp_avg_sq_mean, *rest = values
        tensor_lrs = iter(rest)
        if not exp_avg_sq_mean > 0:
            return None
        rms = math.sqrt(exp_avg_sq_mean)
        for index, (lr, largest, weight_decay, eps, max_decay) in enumerate(decays):
            lr = next(tensor_lrs) if isinstance(lr, Tensor) else lr
            largest = next(tensor_lrs) if isinstance(largest, Tensor) else largest
            scheduled = weight_decay / (rms + eps) * (max(lr, 0.0) / largest if largest > max(lr, 0.0) else 1)
            acts_like = (
                f"at an rms gradient of {rms:.2g} weight_decay={weight_decay:g} acts like {scheduled:.3g} in AdamW"
            )
            if lr * scheduled > max_decay:
                larger = " If so large a decay is meant, pass a larger max_decay=, up to 1." if max_decay < 1 else ""
                return (
                    f"max_decay={max_decay:g} binds in parameter group {index}: {acts_like} and would remove "
                    f"{100 * lr * scheduled:.3g}% of each weight in one step. {self.advice}{larger}"
                )
            if is_early and lr > 0 and scheduled > FAR_BEYOND_ADAMW:
                return (
                    f"The weight decay of parameter group {index} is far beyond what is used with AdamW, 0.01 to 0.3: "
                    f"{acts_like}. {self.advice} Or use weight_decay={0.1 * rms:.1g}, which acts like 0.1 now."
                )
        return None


def _decay_of(group: Mapping[str, Any]) -> GroupDecay:
    largest: float | Tensor = 0.0
    if group.get("corrected_decay"):
        given, so_far = group["largest_lr"] or 0.0, group[SO_FAR]
        largest = so_far.clamp(min=given) if isinstance(so_far, Tensor) else max(given, so_far)
    weight_decay = group["weight_decay"] if group.get("adamw_weight_decay") is None else 0.0
    return GroupDecay(group["lr"], largest, weight_decay, group["eps"], group["max_decay"])
