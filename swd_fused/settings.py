"""Attributes that users set after construction: checked as arguments are, and obeyed from the next step on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swd_fused.checks import Check
from swd_fused.new_groups import check_fit
from swd_fused.options import checked

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS


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
