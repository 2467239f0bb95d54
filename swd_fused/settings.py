"""Attributes that users set after construction: checked as arguments are, and obeyed from the next step on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swd_fused.checks import Check
from swd_fused.new_groups import check_fit
from swd_fused.options import GLOBAL_OPTIONS, GROUP_OPTIONS, checked

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS

IN_GROUPS = 'each group has its own. Set it there: for group in optimizer.param_groups: group["{name}"] = ...'
BUILT_IN = "its state and kernels depend on it. Build a new optimizer with it, and load this one's state_dict()."

# What cannot be set, unless the class has a `Setting` for it, and what to do instead.
FIXED = {
    **{name: IN_GROUPS.format(name=name) for name in GROUP_OPTIONS},
    **dict.fromkeys((*GLOBAL_OPTIONS, "options"), BUILT_IN),
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

    def __init__(self, check: Check) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: FusedAdamS, owner: type) -> Any:
        return self if optimizer is None else unwrapped(optimizer).__dict__[self._name]

    def __set__(self, optimizer: FusedAdamS, value: Any) -> None:
        self._check.require(self._name, value)
        unwrapped(optimizer).__dict__[self._name] = value


def unwrapped(optimizer: FusedAdamS) -> FusedAdamS:
    """Returns the optimizer itself where a wrapper poses as one: Lightning Fabric's is of a subclass, and has none of
    its attributes."""
    while "_stepper" not in optimizer.__dict__ and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


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
        known = optimizer.__dict__.get(name)
        if not isinstance(known, (Setting, Checked)):
            setattr(optimizer, name, Fixed(name, advice, known))
