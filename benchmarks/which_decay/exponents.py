"""From runs on stairs to exponents: how norms at equilibrium scale with the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

import numpy as np

from benchmarks.studies.intervals import Interval, t_interval
from benchmarks.studies.rows import Row, grouped
from benchmarks.studies.runner import Record
from benchmarks.which_decay.contenders import DECAYING, by_name
from benchmarks.which_decay.lr_schedules import Staircase
from benchmarks.which_decay.parts import Run

# E-foldings of the squared weight norm before the part of a stage that is measured. What is left of the difference
# between the start and the equilibrium is then 5% of it.
SETTLED = 3.0
FEWEST_LRS = 3

# `unit_grad_norm`, the gradient norm times the weight norm, is the gradient of the same net with weights of norm 1.
QUANTITIES = ("normed_grad_norm", "normed_weight_norm", "unit_grad_norm", "grad_norm")


def stages(run: Run, record: Record) -> Iterator[Row]:
    """Yields a row for each stage, measured in its second half. The first one is for coming to the equilibrium.

    `e_foldings` says how near. `balance` is 2 shrink |p|^2 / (lr^2 * number of weights), 1 where updates are a random
    walk as Adam makes it from noise.
    """
    schedule = run.schedule
    assert isinstance(schedule, Staircase)
    for number, of_stage in groupby(record["points"], key=lambda point: schedule.stage(point["step"])):
        points = list(of_stage)
        length = sum(point["steps"] for point in points)
        middle = points[-1]["step"] - length // 2
        measured = [point for point in points if point["step"] > middle]
        # Cautious decay takes about half of what it is given.
        share = 0.5 if by_name(run.contender).cautious else 1.0
        e_foldings = 2 * share * sum(point["summed_decay"] for point in points if point["step"] <= middle)
        shrink = sum(point["summed_decay"] for point in measured) / sum(point["steps"] for point in measured)
        lr, weight_norm = schedule.lrs[number], rms(measured, "normed_weight_norm")
        grad_norm = rms(measured, "normed_grad_norm")
        yield {
            "task": run.task,
            "contender": run.contender,
            "decay": run.decay,
            "seed": run.seed,
            "stage": number,
            "lr": lr,
            "length": length,
            "e_foldings": e_foldings,
            "settled": e_foldings >= SETTLED,
            "grad_norm": rms([{**p, "grad_norm": math.sqrt(p["squared_grad_norm"])} for p in measured], "grad_norm"),
            "normed_grad_norm": grad_norm,
            "normed_weight_norm": weight_norm,
            "unit_grad_norm": grad_norm * weight_norm,
            "shrink": shrink,  # in a step
            "balance": 2 * shrink * weight_norm**2 / (lr**2 * record["normed_parameters"]),
            "train_loss": sum(p["steps"] * p["train_loss"] for p in measured) / sum(p["steps"] for p in measured),
        }


def rms(points: Sequence[Row], name: str) -> float:
    return math.sqrt(sum(p["steps"] * p[name] ** 2 for p in points) / sum(p["steps"] for p in points))


@dataclass(frozen=True)
class Exponent:
    """`interval` is over seeds, or None where too few stages have settled."""

    task: str
    contender: str
    quantity: str
    interval: Interval | None
    seeds: int
    left_out: int  # stages that had not settled
    settled: Sequence[Row]

    @property
    def predicted(self) -> float | None:
        """None for what the theory does not speak of."""
        exponent = by_name(self.contender).exponent
        if exponent is None or self.quantity == "grad_norm":
            return None
        return {"normed_grad_norm": exponent, "normed_weight_norm": -exponent, "unit_grad_norm": 0.0}[self.quantity]


def slope(lrs: Sequence[float], norms: Sequence[float]) -> float:
    """Returns the exponent of the power law that fits best, by least squares of logarithms."""
    return float(np.polyfit(np.log(lrs), np.log(norms), 1)[0])


def exponents(rows: Iterable[Row]) -> list[Exponent]:
    """By task, contender and quantity. Each seed is fitted by itself."""
    found = []
    for (task, contender), own in grouped(rows, ["task", "contender"]).items():
        settled = [row for row in own if str(row["settled"]) == "True"]
        by_seed = list(grouped(settled, ["seed"]).values())
        enough = bool(by_seed) and min(len({row["lr"] for row in of_seed}) for of_seed in by_seed) >= FEWEST_LRS
        for quantity in QUANTITIES:
            interval = None
            if enough:
                slopes = [slope([r["lr"] for r in of], [r[quantity] for r in of]) for of in by_seed]
                interval = t_interval(slopes)
            left_out = len(own) - len(settled)
            found.append(Exponent(task, contender, quantity, interval, len(by_seed), left_out, settled))
    return found


HEADINGS = [
    *("kind", "predicted", "gradient norm", "weight norm", "gradient x weight norm", "gradient norm, whole model"),
    *("seeds", "balance, from the largest lr to the smallest", "back at the first lr / first", "stages left out"),
]


def cells(found: Sequence[Exponent]) -> list[list[str]]:
    """For cautious decay the inverse of `balance` is the share of the decay that acts.

    Where stairs lead back to where they began, gradients should be as they were there.
    """
    lines = []
    for contender in DECAYING:
        own = {exponent.quantity: exponent for exponent in found if exponent.contender == contender.name}
        if not own:
            continue
        first = own["normed_grad_norm"]
        measured = [shown(own[quantity].interval) for quantity in QUANTITIES]
        lrs = [row["lr"] for row in first.settled]
        balance = [
            fmean(row["balance"] for row in first.settled if row["lr"] == lr)
            for lr in ((max(lrs), min(lrs)) if lrs else ())
        ]
        lines.append(
            [
                contender.name,
                f"{first.predicted:+.2f}",
                *measured,
                str(first.seeds),
                " to ".join(f"{value:.2f}" for value in balance),
                returned(first.settled),
                str(first.left_out),
            ]
        )
    return lines


def shown(interval: Interval | None) -> str:
    if interval is None:
        return "not settled"
    half = interval.high - interval.mean
    return f"{interval.mean:+.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")


def returned(settled: Sequence[Row]) -> str:
    first = {row["seed"]: row for row in settled if row["stage"] == 0}
    ratios = [
        row["normed_grad_norm"] / first[row["seed"]]["normed_grad_norm"]
        for row in settled
        if row["stage"] > 0 and row["seed"] in first and row["lr"] == first[row["seed"]]["lr"]
    ]
    return f"{fmean(ratios):.2f}" if ratios else ""
