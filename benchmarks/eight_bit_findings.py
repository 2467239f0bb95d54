"""What is found by training with moments in 8 bits: each contender against its reference, over all seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.eight_bit_contenders import by_name

Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A contender in a task, over its seeds. `difference` is from the reference's run of the same seed."""

    task: str
    contender: str
    reference: str
    train_loss: tuple[float, float]
    difference: tuple[float, float]
    held_out_loss: tuple[float, float]
    held_out_difference: tuple[float, float]
    accuracy: float
    sum_of_v: float
    mean_of_v_rms: float
    largest_update: float
    spread: float
    held_out_spread: float

    @property
    def no_worse(self) -> bool:
        """Whether no loss is higher than the reference's by more than the reference's seeds deviate."""
        return self.difference[0] <= self.spread and self.held_out_difference[0] <= self.held_out_spread


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def findings(rows: Sequence[Row]) -> Iterator[Finding]:
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        for name in dict.fromkeys(row["contender"] for row in of_task):
            reference = by_name(name).reference
            own, others = ({int(r["seed"]): r for r in of_task if r["contender"] == n} for n in (name, reference))

            def values(column: str, runs: dict[int, Row]) -> list[float]:
                return [float(runs[seed][column]) for seed in sorted(runs)]

            def differences(column: str, own: dict[int, Row] = own, others: dict[int, Row] = others) -> list[float]:
                return [float(own[seed][column]) - float(others[seed][column]) for seed in sorted(own)]

            yield Finding(
                task,
                name,
                reference,
                mean_and_deviation(values("train_loss", own)),
                mean_and_deviation(differences("train_loss")),
                mean_and_deviation(values("held_out_loss", own)),
                mean_and_deviation(differences("held_out_loss")),
                fmean(values("held_out_accuracy", own)),
                fmean(values("sum_of_v", own)),
                math.sqrt(fmean(value**2 for value in values("mean_of_v_rms", own))),
                max(values("largest_update", own)),
                mean_and_deviation(values("train_loss", others))[1],
                mean_and_deviation(values("held_out_loss", others))[1],
            )


def compared(difference: float, spread: float) -> str:
    if abs(difference) <= spread:
        return "within the spread"
    return "lower by more than the spread" if difference < 0 else "HIGHER by more than the spread"


def verdict(finding: Finding) -> str:
    if not finding.spread or not finding.train_loss[1]:
        return f"{finding.task}: {finding.contender} is not judged: one seed has no spread."
    losses = (
        ("training", finding.difference[0], finding.spread),
        ("held-out", finding.held_out_difference[0], finding.held_out_spread),
    )
    said = (f"{kind} loss {value:+.4f}, {compared(value, spread)} of {spread:.4f}" for kind, value, spread in losses)
    judged = "no worse" if finding.no_worse else "WORSE"
    return f"{finding.task}: {finding.contender} is {judged} than {finding.reference}: {'; '.join(said)}"


HEADINGS = (
    "train loss",
    "difference",
    "held-out loss",
    "accuracy",
    "sum of v",
    "mean of v, rms",
    "largest update / lr",
)


def cells(finding: Finding) -> list[str]:
    is_reference = finding.contender == finding.reference
    return [
        "{:.4f} ± {:.4f}".format(*finding.train_loss),
        "" if is_reference else "{:+.4f} ± {:.4f}".format(*finding.difference),
        "{:.4f} ± {:.4f}".format(*finding.held_out_loss),
        f"{finding.accuracy:.2%}",
        f"{finding.sum_of_v:+.2%}",
        f"{finding.mean_of_v_rms:.2%}",
        f"{finding.largest_update:,.1f}" if finding.largest_update < 100 else f"{finding.largest_update:,.0f}",
    ]


def table(task: str, found: Sequence[Finding], rows: Sequence[Row]) -> Table:
    first = next(row for row in rows if row["task"] == task)
    seeds = len({row["seed"] for row in rows})
    title = f"{task}: {int(first['parameters']):,} parameters, {first['steps']} steps, {seeds} seeds (mean ± deviation)"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    result.add_column("contender", no_wrap=True)
    for heading in HEADINGS:
        result.add_column(heading, justify="right")
    for finding in found:
        if finding.task == task:
            result.add_row(finding.contender, *cells(finding))
    return result


def markdown(rows: Sequence[Row]) -> str:
    """Returns the tables as the documentation has them."""
    lines: list[str] = []
    found = list(findings(rows))
    for task in dict.fromkeys(finding.task for finding in found):
        lines += [f"| {task} | " + " | ".join(HEADINGS) + " |", "|---|" + "---|" * len(HEADINGS)]
        lines += [f"| {each.contender} | " + " | ".join(cells(each)) + " |" for each in found if each.task == task]
        lines.append("")
    return "\n".join(lines)
