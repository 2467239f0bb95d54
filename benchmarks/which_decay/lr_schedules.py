"""How the learning rate goes over a run: warm-up and a cosine to zero, or stairs down and back up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Cosine:
    lr: float
    steps: int
    warm_up: int

    def at(self, step: int) -> float:
        """`step` counts from 1."""
        if step <= self.warm_up:
            return self.lr * step / self.warm_up
        done = (step - self.warm_up) / (self.steps - self.warm_up + 1)
        return self.lr * (1 + math.cos(math.pi * done)) / 2

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.steps,)


@dataclass(frozen=True)
class Staircase:
    """Constant learning rates, each for as many steps as it takes to come to an equilibrium there."""

    lrs: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def lr(self) -> float:
        return self.lrs[0]

    @property
    def steps(self) -> int:
        return sum(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths))

    @property
    def warm_up(self) -> int:
        """How long AdamS is calibrated: for half of the first stage, after which its weights have settled."""
        return self.lengths[0] // 2

    def stage(self, step: int) -> int:
        return bisect_left(self.ends, step)

    def at(self, step: int) -> float:
        return self.lrs[self.stage(step)]


LrSchedule = Cosine | Staircase


def stairs(lr: float, divisors: Sequence[int], shortest: int, lengthening: int, power: int) -> Staircase:
    """Makes stages as much longer as decay is slower there, with `lr` divided by each of `divisors`."""
    lengths = tuple(max(shortest, lengthening * divisor**power) for divisor in divisors)
    return Staircase(tuple(lr / divisor for divisor in divisors), lengths)
