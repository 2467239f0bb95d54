"""Attributes that users set after construction: checked as arguments are, and obeyed from the next step on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swd_fused.distributed.sharding import local_tensor
from swd_fused.options import GLOBAL_OPTIONS, GROUP_OPTIONS, check_total_numel_covers, checked, message
from swd_fused.tensors.description import backend_for

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS

SETTINGS = ("max_grad_norm", "schedule", "total_numel", "backend")

# What cannot be set, and what to do instead.
FIXED = {
    **{
        name: "its state and kernels depend on it. Build a new optimizer with it, and load this one's state_dict()."
        for name in ("options", *GLOBAL_OPTIONS)
        if name not in (*SETTINGS, "set_grad_none")
    },
    **{
        name: f'each group has its own. Set it there: for group in optimizer.param_groups: group["{name}"] = ...'
        for name in GROUP_OPTIONS
        if name != "decay"
    },
    "decay": "its state and kernels depend on it. Build a new optimizer with it, and load this one's state_dict().",
    **dict.fromkeys(("exp_avg_sq_mean", "grad_norm"), "it is what the last step has found."),
    "skipped_steps": "steps count in it. Set it back to 0 by optimizer.skipped_steps.zero_().",
}


class Setting:
    """An option of the whole optimizer as an attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: FusedAdamS, owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer.options, self._name)

    def __set__(self, optimizer: FusedAdamS, value: Any) -> None:
        options = checked(optimizer.options._replace(**{self._name: value}))
        params = optimizer.numbered_params()
        check_total_numel_covers(options.total_numel, sum(local_tensor(param).numel() for param in params))
        for param in params:
            backend_for(param, options)
        optimizer.use(options, self._name)


def check_attribute(name: str, value: object) -> None:
    """Raises if an attribute cannot be set, or not to this value."""
    if name in FIXED:
        raise AttributeError(f"FusedAdamS.{name} cannot be set: {FIXED[name]}")
    if name == "set_grad_none" and not isinstance(value, bool):
        raise ValueError(message(name, value, "True or False"))
    if name == "grad_sumsq_provider" and not (value is None or callable(value)):
        raise ValueError(message(name, value, "a function that returns grad_sumsq and numel, or None"))
