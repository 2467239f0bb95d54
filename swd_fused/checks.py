"""Checks single values. Each message says what was got, what was wanted and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor


class Check(NamedTuple):
    """Holds a condition on a value: a predicate, and the words of the message for values that it rejects."""

    accepts: Callable[[Any], bool]
    wanted: str
    advice: str = ""

    def require(self, name: str, value: object) -> None:
        if not self.accepts(value):
            raise ValueError(message(name, value, self.wanted, self.advice))

    def or_none(self) -> Check:
        """Returns a check that accepts None as well, with the same words."""
        return self._replace(accepts=lambda value: value is None or self.accepts(value))


def is_number(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, (float, Real)) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # an int too large for a float
        return False


def is_finite(value: object, least: float = 0) -> bool:
    return is_number(value) and least <= value < math.inf


def is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_one_float(value: Tensor) -> bool:
    return value.numel() == 1 and value.is_floating_point()


def one_of(*choices: object) -> Check:
    return Check(lambda value: value in choices, f"one of {choices}")


FLAG = Check(lambda value: isinstance(value, bool), "True or False")
FINITE = Check(is_finite, "a finite number >= 0")


def message(name: str, got: object, wanted: str, advice: str = "") -> str:
    return f"FusedAdamS got {name}={got!r}, wanted {wanted}. {advice}".rstrip()
