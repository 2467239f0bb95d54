"""What a run depends on, its learning rates among it, and means over what it measured."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from benchmarks.studies.rows import Row

# Part of every run's name. Count it up when training changes, so that results of the old code are not taken for new.
RECIPE = 2


@dataclass(frozen=True)
class LrSchedule:
    """Stairs: stages of constant learning rates. Or a cosine: one stage, which warms up and then falls to zero.

    AdamS is calibrated in `warm_up` steps.
    """

    lrs: tuple[float, ...]
    lengths: tuple[int, ...]
    warm_up: int
    is_cosine: bool = False

    @property
    def lr(self) -> float:
        return self.lrs[0]

    @property
    def steps(self) -> int:
        return sum(self.lengths)

    def stage(self, step: int) -> int:
        return bisect_left(list(accumulate(self.lengths)), step)

    def at(self, step: int) -> float:
        """`step` counts from 1."""
        if not self.is_cosine:
            return self.lrs[self.stage(step)]
        if step <= self.warm_up:
            return self.lr * step / self.warm_up
        done = (step - self.warm_up) / (self.steps - self.warm_up + 1)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


def cosine(lr: float, steps: int, warm_up: int) -> LrSchedule:
    return LrSchedule((lr,), (steps,), warm_up, is_cosine=True)


def stairs(lr: float, divisors: Sequence[int], shortest: int, lengthening: int, power: int) -> LrSchedule:
    """Makes stages as much longer as decay is slower there, with `lr` divided by each of `divisors`.

    AdamS is calibrated for half of the first stage, after which its weights have settled.
    """
    lengths = tuple(max(shortest, lengthening * divisor**power) for divisor in divisors)
    return LrSchedule(tuple(lr / divisor for divisor in divisors), lengths, lengths[0] // 2)


@dataclass(frozen=True)
class Run:
    task: str
    data: str  # tells data from others
    contender: str
    decay: float  # in AdamW's terms
    seed: int
    schedule: LrSchedule
    every: int  # steps in a window; one ends at the end of a stage, too

    @property
    def key(self) -> str:
        """A name for its file: what people look for, and a digest of all it depends on."""
        digest = hashlib.sha256(json.dumps([RECIPE, asdict(self)], sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.task}-{self.contender}-{self.decay:g}-{self.seed}-{digest}"

    @property
    def columns(self) -> Row:
        return {name: getattr(self, name) for name in ("task", "contender", "decay", "seed")}

    @property
    def windows(self) -> list[int]:
        schedule = self.schedule
        ends = sorted({*range(self.every, schedule.steps, self.every), *accumulate(schedule.lengths)})
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def mean(points: Sequence[Row], name: str, power: int = 1) -> float:
    """Over steps: a point is the mean of a window of them."""
    return float(sum(p["steps"] * p[name] ** power for p in points)) / sum(p["steps"] for p in points)


def rms(points: Sequence[Row], name: str) -> float:
    return math.sqrt(mean(points, name, 2))
