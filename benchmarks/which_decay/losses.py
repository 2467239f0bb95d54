"""What grids of decays show: each kind's best decay, and its losses beside AdamW's for the seeds that judge it.

The decay with the lowest validation loss of seed 0 is the best one. That seed does not judge it, since its loss is
partly the lowest by luck. A decay that was fixed beforehand is judged by all seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.studies.intervals import Interval, t_interval
from benchmarks.studies.rows import Row, chosen
from benchmarks.studies.runner import Record
from benchmarks.which_decay.contenders import ADAMW, BY_NAME, DECAYING
from benchmarks.which_decay.runs import Run, rms

END = 0.1  # the last share of steps, over which gradient norms at the end are taken
FEWEST = 3  # seeds for an interval: with two it would be six times as wide as with three
TUNING_SEED = 0


def rows_of(run: Run, record: Record) -> Iterator[Row]:
    """Yields the row of a run of a grid. `shrink`, the sum of what decay took, lets decays be compared at equal totals.

    `growth` is the gradient norm at the end over that of the steps around the middle.
    """
    points, steps = record["points"], run.schedule.steps
    last = points[-1]

    def within(first: float, end: float) -> list[Row]:
        return [p for p in points if first * steps < p["step"] - p["steps"] / 2 <= end * steps] or [last]

    at_end = rms(within(1 - END, 1.0), "normed_grad_norm")
    yield {
        **run.columns,
        "steps": steps,
        "lr": run.schedule.lr,
        "data": run.data,
        "parameters": record["parameters"],
        **{name: last[name] for name in ("validation_loss", "test_loss", "train_loss")},
        "shrink": sum(point["summed_decay"] for point in points),
        "grad_norm": rms(within(1 - END, 1.0), "grad_norm"),
        "normed_grad_norm": at_end,
        "growth": at_end / rms(within(0.4, 0.6), "normed_grad_norm"),
        **{name: last[name] for name in ("weight_norm", "normed_weight_norm")},
    }


@dataclass(frozen=True)
class Finding:
    """A kind at one decay, over the seeds that judge it. Differences are from AdamW's run of the same seed."""

    contender: str
    decay: float
    rows: list[Row]
    adamw: list[Row]

    def mean(self, column: str) -> float:
        return fmean(row[column] for row in self.rows)

    def spread(self, column: str) -> str:
        values = [row[column] for row in self.rows]
        return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")

    def differences(self, column: str) -> list[float]:
        others = {row["seed"]: row[column] for row in self.adamw}
        return [row[column] - others[row["seed"]] for row in self.rows if row["seed"] in others]

    def interval(self, column: str) -> Interval | None:
        """95%, for all kinds together."""
        values = self.differences(column)
        return t_interval(values, len(DECAYING)) if len(values) >= FEWEST else None

    def difference(self, column: str) -> str:
        if (interval := self.interval(column)) is not None:
            return f"{interval.mean:+.3f} ± {interval.high - interval.mean:.3f}"
        return ", ".join(f"{value:+.3f}" for value in self.differences(column))


def findings(rows: Sequence[Row], task: str, at: float | None = None) -> list[Finding]:
    """At each kind's best decay, or for all `at` one decay."""
    judged: dict[str, list[Row]] = {}
    for name in BY_NAME:
        own = chosen(rows, task=task, contender=name)
        if at is not None:
            judged[name] = chosen(own, decay=at)
        elif tuning := chosen(own, seed=TUNING_SEED):
            best = min(tuning, key=lambda row: row["validation_loss"])["decay"]
            judged[name] = [row for row in chosen(own, decay=best) if row["seed"] != TUNING_SEED]
    adamw = judged.get(ADAMW)
    return [Finding(name, own[0]["decay"], own, adamw) for name, own in judged.items() if own and adamw]


HEADINGS = (
    *("kind", "decay", "validation loss", "test loss", "from AdamW, validation", "from AdamW, test"),
    *("total decay", "gradient norm, end (whole model)", "end / middle", "weight norm"),
)
LOSSES = ("validation_loss", "test_loss")


def cells(found: Sequence[Finding]) -> Iterator[list[str]]:
    for each in found:
        yield [
            each.contender,
            f"{each.decay:g}",
            *(each.spread(column) for column in LOSSES),
            *("" if each.contender == ADAMW else each.difference(column) for column in LOSSES),
            f"{each.mean('shrink'):.2f}",
            f"{each.mean('normed_grad_norm'):.3g} ({each.mean('grad_norm'):.3g})",
            f"{each.mean('growth'):.2f}",
            f"{each.mean('normed_weight_norm'):.1f}",
        ]
