"""Attributes that users set after construction: checked as arguments are, and obeyed from the next step on."""

from __future__ import annotations

from typing import Any

from swd_fused import backends
from swd_fused.distributed.sharding import local_tensor
from swd_fused.gradient_release import GradientRelease, check_can_release
from swd_fused.options import (
    GLOBAL_OPTIONS,
    GROUP_OPTIONS,
    check_backend_name,
    check_schedule,
    check_total_numel,
    check_total_numel_covers,
    message,
    needs_one_pass,
)
from swd_fused.step import TakesSteps

# What decides how a step is taken, and must not change while gradient release is in the middle of one.
OF_A_STEP = ("max_grad_norm", "schedule", "total_numel", "backend")
CHECKED = {*OF_A_STEP, "set_grad_none", "grad_sumsq_provider"}

# What cannot be set, and what to do instead.
FIXED = {
    **{
        name: "its state and kernels depend on it. Build a new optimizer with it, and load this one's state_dict()."
        for name in ("options", *GLOBAL_OPTIONS)
        if name not in CHECKED
    },
    **{
        name: f'each group has its own. Set it there: for group in optimizer.param_groups: group["{name}"] = ...'
        for name in GROUP_OPTIONS
    },
    **dict.fromkeys(("exp_avg_sq_mean", "grad_norm"), "it is what the last step has found."),
    "skipped_steps": "steps count in it. Set it back to 0 by optimizer.skipped_steps.zero_().",
}


class HasSettings(TakesSteps):
    """The part of FusedAdamS that checks its attributes, which the constructor puts into `__dict__`."""

    set_grad_none: bool
    _gradient_release: GradientRelease | None = None  # neither copied nor pickled

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED:
            raise AttributeError(f"FusedAdamS.{name} cannot be set: {FIXED[name]}")
        if name in CHECKED:
            self._check_setting(name, value)
        super().__setattr__(name, value)
        if name == "backend":
            self._buckets = self._new_buckets()
        elif name in ("schedule", "max_grad_norm"):
            # The sums that a step has left are too old when steps that need them come again.
            self._step_before.forget()

    def _check_setting(self, name: str, value: Any) -> None:
        if name in OF_A_STEP and self._gradient_release is not None and self._gradient_release.has_begun:
            raise RuntimeError(
                f"FusedAdamS got {name}={value!r} after a backward pass that has stepped parameters already, with "
                f"release_gradients() on: {name} holds for whole steps. Call optimizer.step() first."
            )
        if name in ("schedule", "max_grad_norm"):
            self._check_schedule(**{"schedule": self.schedule, "max_grad_norm": self.max_grad_norm, name: value})
        elif name == "total_numel":
            check_total_numel(value)
            check_total_numel_covers(value, sum(local_tensor(param).numel() for param in self.numbered_params()))
        elif name == "backend":
            check_backend_name(value)
            for param in self.numbered_params():
                backends.choose_for(value, param)
        elif name == "set_grad_none" and not isinstance(value, bool):
            raise ValueError(message(name, value, "True or False"))
        elif name == "grad_sumsq_provider" and not (value is None or callable(value)):
            raise ValueError(message(name, value, "a function that returns grad_sumsq and numel, or None"))

    def _check_schedule(self, schedule: Any, max_grad_norm: float | None) -> None:
        check_schedule(schedule, max_grad_norm, self.options)
        if self._gradient_release is not None:
            one_pass = needs_one_pass(schedule, max_grad_norm, self.options)
            check_can_release(one_pass, max_grad_norm, self.options)
