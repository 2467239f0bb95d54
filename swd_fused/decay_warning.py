"""Warns, once, that `max_decay` binds, without making any step wait for its device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from swd_fused.upload import HostCopy, can_be_read_later, is_fake

ADVICE = (
    "FusedAdamS divides weight_decay by the rms gradient, so values made for AdamW are far too large: pass those to "
    "optimizer.match_adamw(weight_decay=...) instead."
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

    def __init__(self, advice: str = ADVICE) -> None:
        self._advice = advice
        self._done = False
        self._message: str | None = None
        self._pending: tuple[HostCopy, list[GroupDecay]] | None = None

    def note(self, exp_avg_sq_mean: Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes up the mean of a step that has been taken."""
        if self._done or self._message is not None or self._pending is not None or is_fake(exp_avg_sq_mean):
            return
        tensor_lrs = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
        decays = [
            GroupDecay(
                None if isinstance(group["lr"], Tensor) else group["lr"],
                group["weight_decay"],
                group["eps"],
                group["max_decay"],
            )
            for group in groups
        ]
        if exp_avg_sq_mean.is_cpu:
            self._message = self._bound([float(value) for value in (exp_avg_sq_mean, *tensor_lrs)], decays)
        elif can_be_read_later(exp_avg_sq_mean):
            self._pending = HostCopy([exp_avg_sq_mean, *tensor_lrs]), decays

    def warn(self) -> None:
        """Warns of what earlier steps have shown. To be called before a step changes anything."""
        if self._pending is not None:
            copy, decays = self._pending
            values = copy.arrived()
            if values is not None:
                self._pending = None
                self._message = self._bound(values, decays)
        if self._message is not None:
            message, self._message, self._done = self._message, None, True
            warnings.warn(message, stacklevel=2)

    def _bound(self, values: list[float], decays: list[GroupDecay]) -> str | None:
        """Returns the warning, if there is one. `values` are the mean and those learning rates that are tensors."""
        exp_avg_sq_mean, *rest = values
        tensor_lrs = iter(rest)
        if not exp_avg_sq_mean > 0:
            return None
        rms = math.sqrt(exp_avg_sq_mean)
        for index, (lr, weight_decay, eps, max_decay) in enumerate(decays):
            lr = next(tensor_lrs) if lr is None else lr
            scheduled = weight_decay / (rms + eps)
            if lr * scheduled > max_decay:
                return (
                    f"max_decay={max_decay:g} binds in parameter group {index}: at an rms gradient of {rms:.2g} "
                    f"weight_decay={weight_decay:g} acts like {scheduled:.3g} in AdamW and would remove "
                    f"{lr * scheduled:.3g} of each weight in one step. {self._advice}"
                )
        return None
