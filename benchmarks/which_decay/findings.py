"""What grids of decays show: each kind's best decay, and its losses beside AdamW's for the seeds that judge it.

The decay with the lowest validation loss of seed 0 is the best one. That seed does not judge it, since its loss is
partly the lowest by luck. A decay that was fixed beforehand is judged by all seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.studies.intervals import Interval, t_interval
from benchmarks.studies.rows import Row, chosen
from benchmarks.studies.runner import Record
from benchmarks.which_decay.contenders import ADAMW, CONTENDERS
from benchmarks.which_decay.parts import Run

END = 0.1  # the last share of steps, over which gradient norms at the end are taken
FEWEST = 3  # seeds for an interval: with two it would be six times as wide as with three
TUNING_SEED = 0


def row_of(run: Run, record: Record) -> Row:
    """A run of a grid. `shrink` is the sum of what decay took, so that decays can be compared at equal totals.

    `growth` is the gradient norm at the end over that of the steps around the middle.
    """
    points, steps = record["points"], run.schedule.steps
    last = points[-1]

    def rms(name: str, first: float, end: float) -> float:
        within = [p for p in points if first * steps < p["step"] - p["steps"] / 2 <= end * steps] or [last]
        return math.sqrt(sum(p["steps"] * p[name] ** 2 for p in within) / sum(p["steps"] for p in within))

    at_end = rms("normed_grad_norm", 1 - END, 1.0)
    return {
        "task": run.task,
        "contender": run.contender,
        "decay": run.decay,
        "seed": run.seed,
        "steps": steps,
        "lr": run.schedule.lr,
        "data": run.data,
        "parameters": record["parameters"],
        **{name: last[name] for name in ("validation_loss", "test_loss", "train_loss")},
        "shrink": sum(point["summed_decay"] for point in points),
        "grad_norm": rms("grad_norm", 1 - END, 1.0),
        "normed_grad_norm": at_end,
        "growth": at_end / rms("normed_grad_norm", 0.4, 0.6),
        "weight_norm": last["weight_norm"],
        "normed_weight_norm": last["normed_weight_norm"],
    }


@dataclass(frozen=True)
class Finding:
    """A kind at one decay, over the seeds that judge it. Differences are from AdamW's run of the same seed."""

    task: str
    contender: str
    decay: float
    at_edge: str  # of the grid, where the best may lie beyond: "lowest", "highest" or ""
    rows: list[Row]
    adamw: list[Row]

    def mean(self, column: str) -> float:
        return fmean(row[column] for row in self.rows)

    def differences(self, column: str) -> list[float]:
        others = {row["seed"]: row[column] for row in self.adamw}
        return [row[column] - others[row["seed"]] for row in self.rows if row["seed"] in others]

    def interval(self, column: str) -> Interval | None:
        """95%, for all kinds together."""
        values = self.differences(column)
        return t_interval(values, len(CONTENDERS) - 1) if len(values) >= FEWEST else None

    @property
    def verdict(self) -> str:
        """Says that a loss is lower or higher only if that holds for validation and test, beyond the interval."""
        found = [self.interval(column) for column in ("validation_loss", "test_loss")]
        if self.contender == ADAMW:
            return ""
        if any(interval is None for interval in found):
            return "too few seeds"
        if all(interval is not None and interval.high < 0 for interval in found):
            return "lower"
        return "higher" if all(interval is not None and interval.low > 0 for interval in found) else "no"


def findings(rows: Sequence[Row], task: str, at: float | None = None) -> list[Finding]:
    """At each kind's best decay, or for all `at` one decay."""
    tuning = [row for row in chosen(rows, task=task, seed=TUNING_SEED) if at in (None, row["decay"])]
    decays = {
        name: min(own, key=lambda row: row["validation_loss"])["decay"]
        for name in (contender.name for contender in CONTENDERS)
        if (own := chosen(tuning, contender=name))
    }
    judged = {
        name: [
            row
            for row in chosen(rows, task=task, contender=name, decay=decay)
            if at is not None or row["seed"] != TUNING_SEED
        ]
        for name, decay in decays.items()
    }
    found = []
    for name, own in judged.items():
        if own and judged.get(ADAMW):
            grid = sorted({row["decay"] for row in chosen(tuning, contender=name)})
            found.append(Finding(task, name, decays[name], edge(decays[name], grid), own, judged[ADAMW]))
    return found


def edge(decay: float, grid: Sequence[float]) -> str:
    if len(grid) < 2 or grid[0] < decay < grid[-1]:
        return ""
    return "lowest" if decay == grid[0] else "highest"


HEADINGS = [
    *("kind", "decay", "validation loss", "test loss", "from AdamW, validation", "from AdamW, test", "beyond seeds?"),
    *("total decay", "gradient norm, end (whole model)", "end / middle", "weight norm"),
]


def cells(found: Sequence[Finding]) -> list[list[str]]:
    return [
        [
            each.contender,
            f"{each.decay:g}" + (f" ({each.at_edge})" if each.at_edge else ""),
            *(spread([row[column] for row in each.rows]) for column in ("validation_loss", "test_loss")),
            *(difference(each, column) for column in ("validation_loss", "test_loss")),
            each.verdict,
            f"{each.mean('shrink'):.2f}",
            f"{each.mean('normed_grad_norm'):.3g} ({each.mean('grad_norm'):.3g})",
            f"{each.mean('growth'):.2f}",
            f"{each.mean('normed_weight_norm'):.1f}",
        ]
        for each in found
    ]


def difference(finding: Finding, column: str) -> str:
    if finding.contender == ADAMW:
        return ""
    interval = finding.interval(column)
    if interval is not None:
        return f"{interval.mean:+.3f} ± {interval.high - interval.mean:.3f}"
    return ", ".join(f"{value:+.3f}" for value in finding.differences(column))


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
