"""From runs on stairs to exponents: how norms at equilibrium scale with the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.stats import t as students_t

from benchmarks.which_decay.contenders import by_name
from benchmarks.which_decay.lr_schedules import Staircase
from benchmarks.which_decay.run import Point, Run, Trained

# E-foldings of the squared weight norm before the part of a stage that is measured. What is left of the difference
# between the start and the equilibrium is then 5% of it.
SETTLED = 3.0
FEWEST_LRS = 3

QUANTITIES = {
    "normed_grad_norm": "gradient norm, layers that a norm follows",
    "grad_norm": "gradient norm, whole model",
    "normed_weight_norm": "weight norm, layers that a norm follows",
    "unit_grad_norm": "gradient norm times weight norm",
}


@dataclass(frozen=True)
class Stage:
    """The second half of a stage. The first one is for coming to the equilibrium: `e_foldings` says how near.

    `balance` is 2 shrink |p|^2 / (lr^2 * number of weights), 1 where updates are a random walk as Adam makes it from
    noise. `unit_grad_norm`, the gradient norm times |p|, is the gradient of the same net with weights of norm 1.
    """

    task: str
    contender: str
    decay: float
    seed: int
    stage: int
    lr: float
    length: int
    e_foldings: float
    settled: bool
    grad_norm: float
    normed_grad_norm: float
    normed_weight_norm: float
    unit_grad_norm: float
    shrink: float  # in a step
    balance: float
    train_loss: float


def stages(run: Run, trained: Trained) -> list[Stage]:
    assert isinstance(run.schedule, Staircase)
    of_stage: dict[int, list[Point]] = {}
    for point in trained.points:
        of_stage.setdefault(run.schedule.stage(point.step), []).append(point)
    return [_stage(run, trained.normed_parameters, number, points) for number, points in of_stage.items()]


def _stage(run: Run, parameters: int, number: int, points: Sequence[Point]) -> Stage:
    end, length = points[-1].step, sum(point.steps for point in points)
    middle = end - length // 2
    before = [point for point in points if point.step <= middle]
    measured = [point for point in points if point.step > middle]
    # Cautious decay takes about half of what it is given.
    share = 0.5 if by_name(run.contender).cautious else 1.0
    e_foldings = 2 * share * sum(point.shrink for point in before)
    steps = sum(point.steps for point in measured)
    shrink = sum(point.shrink for point in measured) / steps
    grad_norm, normed_grad_norm, weight_norm = (
        math.sqrt(sum(point.steps * getattr(point, name) ** 2 for point in measured) / steps)
        for name in ("grad_norm", "normed_grad_norm", "normed_weight_norm")
    )
    lr = measured[0].lr
    return Stage(
        run.task,
        run.contender,
        run.decay,
        run.seed,
        number,
        lr,
        length,
        e_foldings,
        e_foldings >= SETTLED,
        grad_norm,
        normed_grad_norm,
        weight_norm,
        normed_grad_norm * weight_norm,
        shrink,
        2 * shrink * weight_norm**2 / (lr**2 * parameters),
        sum(point.steps * point.train_loss for point in measured) / steps,
    )


def stage_of(row: Mapping[str, str]) -> Stage:
    """Reads a line of the CSV."""
    texts = {field.name: row[field.name] for field in fields(Stage)}
    read: dict[str, Callable[[str], Any]] = {
        "str": str,
        "float": float,
        "int": int,
        "bool": lambda text: text == "True",
    }
    return Stage(**{field.name: read[str(field.type)](texts[field.name]) for field in fields(Stage)})


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, and 95% confidence interval: of several comparisons, for all of them together (Bonferroni).

    One seed has none.
    """

    mean: float
    half_width: float

    def contains(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half_width

    @staticmethod
    def of(values: Sequence[float], comparisons: int = 1) -> Interval:
        if len(values) < 2:
            return Interval(fmean(values), math.nan)
        quantile = float(students_t.ppf(1 - 0.025 / comparisons, len(values) - 1))
        return Interval(fmean(values), quantile * stdev(values) / math.sqrt(len(values)))

    def shown(self, digits: int) -> str:
        interval = "" if math.isnan(self.half_width) else f" ± {self.half_width:.{digits}f}"
        return f"{self.mean:+.{digits}f}{interval}"


@dataclass(frozen=True)
class Exponent:
    """`predicted` is None for what the theory does not speak of."""

    task: str
    contender: str
    quantity: str
    predicted: float | None
    interval: Interval
    seeds: int
    lrs: int
    left_out: int  # stages that had not settled


def slope(lrs: Sequence[float], norms: Sequence[float]) -> float:
    """The exponent of the power law that fits best, by least squares of logarithms."""
    return float(np.polyfit(np.log(lrs), np.log(norms), 1)[0])


def exponents(of_runs: Iterable[Stage]) -> list[Exponent]:
    """By contender and quantity, where enough stages have settled. Each seed is fitted by itself."""
    every = list(of_runs)
    found = []
    for task, contender in dict.fromkeys((stage.task, stage.contender) for stage in every):
        own = [stage for stage in every if (stage.task, stage.contender) == (task, contender)]
        settled = [stage for stage in own if stage.settled]
        by_seed = {stage.seed: [other for other in settled if other.seed == stage.seed] for stage in settled}
        lrs = {len({stage.lr for stage in of_seed}) for of_seed in by_seed.values()}
        if not lrs or min(lrs) < FEWEST_LRS:
            continue
        for quantity in QUANTITIES:
            slopes = [
                slope([s.lr for s in of_seed], [getattr(s, quantity) for s in of_seed]) for of_seed in by_seed.values()
            ]
            found.append(
                Exponent(
                    task,
                    contender,
                    quantity,
                    predicted(contender, quantity),
                    Interval.of(slopes),
                    len(by_seed),
                    min(lrs),
                    len(own) - len(settled),
                )
            )
    return found


def predicted(contender: str, quantity: str) -> float | None:
    exponent = by_name(contender).exponent
    if exponent is None or quantity == "grad_norm":
        return None
    return {"normed_grad_norm": exponent, "normed_weight_norm": -exponent, "unit_grad_norm": 0.0}[quantity]
