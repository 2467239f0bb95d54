"""What grids of decays show: each contender's best decay, and whether seeds carry its difference from AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from benchmarks.which_decay.contenders import ADAMW, CONTENDERS
from benchmarks.which_decay.exponents import Interval
from benchmarks.which_decay.run import Run, Trained

Row = dict[str, Any]

END = 0.1  # the last share of steps, over which gradient norms at the end are taken


def row(run: Run, trained: Trained) -> Row:
    """A run of a grid. `shrink` is the sum of what decay took, so that decays can be compared at equal totals.

    `growth` is the gradient norm at the end over that of the steps around the middle.
    """
    steps = run.schedule.steps

    def norm(name: str, first: float, last: float) -> float:
        chosen = [point for point in trained.points if first * steps < point.step - point.steps / 2 <= last * steps]
        squares = sum(point.steps * getattr(point, name) ** 2 for point in chosen or trained.points[-1:])
        return math.sqrt(squares / sum(point.steps for point in chosen or trained.points[-1:]))

    at_end = norm("normed_grad_norm", 1 - END, 1.0)
    return {
        "task": run.task,
        "contender": run.contender,
        "decay": run.decay,
        "seed": run.seed,
        "steps": steps,
        "lr": run.schedule.lr,
        "data": run.data,
        "parameters": trained.parameters,
        "validation_loss": trained.validation_loss,
        "test_loss": trained.test_loss,
        "train_loss": trained.points[-1].train_loss,
        "shrink": sum(point.shrink for point in trained.points),
        "shrink_before_fall": sum(point.shrink for point in trained.points if point.lr > 0.5 * run.schedule.lr),
        "grad_norm": norm("grad_norm", 1 - END, 1.0),
        "normed_grad_norm": at_end,
        "growth": at_end / norm("normed_grad_norm", 0.4, 0.6),
        "weight_norm": trained.points[-1].weight_norm,
        "normed_weight_norm": trained.points[-1].normed_weight_norm,
        "warnings": len(trained.warnings),
        "seconds": trained.seconds,
    }


@dataclass(frozen=True)
class Finding:
    """A contender at one decay, over its seeds. Differences are from AdamW's run of the same seed at its own."""

    task: str
    contender: str
    decay: float
    at_edge: str  # of the grid, where the best may lie beyond: "lowest", "highest" or ""
    validation_losses: tuple[float, ...]
    test_losses: tuple[float, ...]
    validation_difference: Interval
    test_difference: Interval
    shrink: float
    normed_grad_norm: float
    growth: float
    normed_weight_norm: float

    @property
    def verdict(self) -> str:
        """Says that a loss is lower or higher only if that holds for validation and test, beyond the interval."""
        differences = (self.validation_difference, self.test_difference)
        if self.contender == ADAMW:
            return ""
        if any(math.isnan(difference.half_width) for difference in differences):
            return "one seed"
        if any(difference.contains(0.0) for difference in differences):
            return "no"
        if all(difference.mean < 0 for difference in differences):
            return "lower"
        return "higher" if all(difference.mean > 0 for difference in differences) else "no"


def findings(rows: Sequence[Row], at: float | None = None) -> list[Finding]:
    """At the decay with the lowest validation loss of seed 0, which all of the grid has; or for all `at` one decay."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        best: dict[str, Row] = {}
        for row in (row for row in rows if row["task"] == task and row["seed"] == 0 and at in (None, row["decay"])):
            other = best.get(row["contender"])
            if other is None or row["validation_loss"] < other["validation_loss"]:
                best[row["contender"]] = row
        if ADAMW not in best:
            continue
        runs = {
            name: {r["seed"]: r for r in rows if (r["task"], r["contender"], r["decay"]) == (task, name, b["decay"])}
            for name, b in best.items()
        }
        for name, own in runs.items():
            grid = sorted({r["decay"] for r in rows if (r["task"], r["contender"]) == (task, name)})
            seeds = sorted(own.keys() & runs[ADAMW].keys())
            validation, test = (
                Interval.of([own[seed][column] - runs[ADAMW][seed][column] for seed in seeds], len(CONTENDERS) - 1)
                for column in ("validation_loss", "test_loss")
            )
            found.append(
                Finding(
                    task,
                    name,
                    best[name]["decay"],
                    edge(best[name]["decay"], grid) if at is None else "",
                    tuple(own[seed]["validation_loss"] for seed in sorted(own)),
                    tuple(own[seed]["test_loss"] for seed in sorted(own)),
                    validation,
                    test,
                    *(
                        fmean(r[column] for r in own.values())
                        for column in ("shrink", "normed_grad_norm", "growth", "normed_weight_norm")
                    ),
                )
            )
    return found


def edge(decay: float, grid: Sequence[float]) -> str:
    if len(grid) < 2 or grid[0] < decay < grid[-1]:
        return ""
    return "lowest" if decay == grid[0] else "highest"


def mean_and_deviation(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")
