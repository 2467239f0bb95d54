"""Attributes that users set after construction: checked as arguments are, and obeyed from the next step on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swd_fused.new_groups import check_fit
from swd_fused.options import GLOBAL_OPTIONS, GROUP_OPTIONS, checked, message

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
        check_fit(options, optimizer.numbered_params())
        optimizer.use(options, self._name)


class Checked:
    """An attribute that is checked when it is set."""

    def __init__(self, wanted: str, is_valid: Callable[[Any], bool]) -> None:
        self._wanted, self._is_valid = wanted, is_valid

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: FusedAdamS, owner: type) -> Any:
        return self if optimizer is None else optimizer.__dict__[self._name]

    def __set__(self, optimizer: FusedAdamS, value: Any) -> None:
        if not self._is_valid(value):
            raise ValueError(message(self._name, value, self._wanted))
        optimizer.__dict__[self._name] = value


class Fixed:
    """An attribute that cannot be set, and may not exist: what is not taken up should not look as if it were."""

    def __init__(self, name: str, advice: str, known: property | None) -> None:
        self._name, self._advice, self._known = name, advice, known
        self.__doc__ = None if known is None else known.__doc__

    def __get__(self, optimizer: FusedAdamS, owner: type) -> Any:
        if self._known is None:
            raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: {self._advice}")
        return self._known if optimizer is None else self._known.__get__(optimizer, owner)

    def __set__(self, optimizer: FusedAdamS, value: object) -> None:
        raise AttributeError(f"FusedAdamS.{self._name} cannot be set: {self._advice}")


def fix_attributes(optimizer: type[FusedAdamS]) -> None:
    """Has the class refuse to set what is in `FIXED`. By descriptors: `__setattr__` would be called in each step."""
    for name, advice in FIXED.items():
        setattr(optimizer, name, Fixed(name, advice, optimizer.__dict__.get(name)))
