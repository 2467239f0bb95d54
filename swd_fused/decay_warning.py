"""Warns, once, of a weight decay that was meant for AdamW, without making any step wait for its device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from swd_fused.schedule import HyperRow
from swd_fused.transfer import HostCopy, can_be_read_later, is_fake

# What nobody uses with AdamW, whose values are 0.01 to 0.3. The paper's 5e-4 acts like 1.2 at most when training of its
# models begins (benchmarks/early_decay.py), AdamW's 0.1 out of habit like 161 in a small language model.
FAR_BEYOND_ADAMW = 10.0

# Only early in training: at its end gradients become small, and a decay that grows is the method.
EARLY_STEPS = 100

ADVICE = (
    "FusedAdamS divides weight_decay by the rms gradient, so values made for AdamW are far too large: pass those as "
    "adamw_weight_decay=... instead, or to optimizer.match_adamw(weight_decay=...)."
)


CALIBRATED_ADVICE = (
    "It was matched to adamw_weight_decay when gradients were larger. Matched over more steps, with a larger "
    "calibration_steps, for instance the warm-up, it is smaller."
)


class GroupDecay(NamedTuple):
    lr: float | None  # None: a tensor, read with the mean
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
        self._early_steps_left = EARLY_STEPS if is_fresh else 0
        self._done = False
        self._message: str | None = None
        self._pending: tuple[HostCopy, list[GroupDecay], bool] | None = None
        self._rows: list[HyperRow] | None = None
        self._harmless = math.inf

    def note(
        self,
        exp_avg_sq_mean: Tensor,
        groups: Sequence[Mapping[str, Any]],
        rows: list[HyperRow] | None = None,
    ) -> None:
        """Takes up the mean of a step that has been taken.

        `rows` are the groups' hyper-parameters, the same list as long as they have not changed.
        """
        if self._done or self._message is not None or self._pending is not None or is_fake(exp_avg_sq_mean):
            return
        is_early, self._early_steps_left = self._early_steps_left > 0, self._early_steps_left - 1
        if rows is not None and exp_avg_sq_mean.is_cpu and float(exp_avg_sq_mean) >= self._harmless_mean(rows):
            return
        tensor_lrs = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
        decays = [_decay_of(group) for group in groups]
        if exp_avg_sq_mean.is_cpu:
            self._message = self._bound([float(value) for value in (exp_avg_sq_mean, *tensor_lrs)], decays, is_early)
        elif can_be_read_later(exp_avg_sq_mean):
            self._pending = HostCopy([exp_avg_sq_mean, *tensor_lrs]), decays, is_early

    def _harmless_mean(self, rows: list[HyperRow]) -> float:
        """Returns a mean from which on there is nothing to warn of. Asked in each step, so it is kept."""
        if rows is not self._rows:
            rms = [
                math.inf if row.lr < 0 else row.weight_decay * max(row.lr / row.max_decay, 1 / FAR_BEYOND_ADAMW)
                for row in rows
            ]
            self._rows, self._harmless = rows, max(rms) * max(rms)  # a float power would raise if too large
        return self._harmless

    def warn(self) -> None:
        """Warns of what earlier steps have shown. To be called before a step changes anything."""
        if self._pending is not None:
            copy, decays, is_early = self._pending
            values = copy.arrived()
            if values is not None:
                self._pending = None
                self._message = self._bound(values, decays, is_early)
        if self._message is not None:
            message, self._message, self._done = self._message, None, True
            warnings.warn(message, stacklevel=2)

    def _bound(self, values: list[float], decays: list[GroupDecay], is_early: bool) -> str | None:
        """Returns the warning, if there is one. `values` are the mean and those learning rates that are tensors."""
        exp_avg_sq_mean, *rest = values
        tensor_lrs = iter(rest)
        if not exp_avg_sq_mean > 0:
            return None
        rms = math.sqrt(exp_avg_sq_mean)
        for index, (lr, weight_decay, eps, max_decay) in enumerate(decays):
            lr = next(tensor_lrs) if lr is None else lr
            scheduled = weight_decay / (rms + eps)
            acts_like = (
                f"at an rms gradient of {rms:.2g} weight_decay={weight_decay:g} acts like {scheduled:.3g} in AdamW"
            )
            if lr * scheduled > max_decay:
                return (
                    f"max_decay={max_decay:g} binds in parameter group {index}: {acts_like} and would remove "
                    f"{lr * scheduled:.3g} of each weight in one step. {self.advice}"
                )
            if is_early and lr > 0 and scheduled > FAR_BEYOND_ADAMW:
                return (
                    f"The weight decay of parameter group {index} is far beyond what is used with AdamW, 0.01 to 0.3: "
                    f"{acts_like}. {self.advice} Or use weight_decay={0.1 * rms:.1g}, which acts like 0.1 now."
                )
        return None


def _decay_of(group: Mapping[str, Any]) -> GroupDecay:
    lr = group["lr"]
    weight_decay = group["weight_decay"] if group.get("adamw_weight_decay") is None else 0.0
    return GroupDecay(None if isinstance(lr, Tensor) else lr, weight_decay, group["eps"], group["max_decay"])
