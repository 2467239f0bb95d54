"""What is found by training with moments in 8 bits: each contender against its reference over all seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.studies.rows import Row, chosen, grouped

LOSSES = {"training": "train_loss", "held-out": "held_out_loss"}
HEADINGS = (
    *("train loss", "difference", "held-out loss", "accuracy"),
    *("sum of v", "mean of v, rms", "largest update / lr"),
)


def differences(rows: Sequence[Row], contender: str, reference: str, column: str) -> list[float]:
    """Within seeds."""
    others = {row["seed"]: row[column] for row in chosen(rows, contender=reference)}
    return [row[column] - others[row["seed"]] for row in chosen(rows, contender=contender) if row["seed"] in others]


def report(rows: Sequence[Row], references: Mapping[str, str]) -> Iterator[str | Table]:
    """A table for each task, then verdicts."""
    verdicts = []
    for (task,), of_task in grouped(rows, ["task"]).items():
        first, seeds = of_task[0], len({row["seed"] for row in of_task})
        title = f"{task}: {first['parameters']:,} parameters, {first['steps']} steps, {seeds} seeds (mean ± deviation)"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        table.add_column("contender", no_wrap=True)
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for (name,), own in grouped(of_task, ["contender"]).items():
            table.add_row(name, *cells(of_task, own, references[name]))
            if name != references[name]:
                verdicts.append(f"{task}: {verdict(of_task, name, references[name])}")
        yield table
    yield "sum of v: what is stored against float32 for the same gradients, after the last step"
    yield "spread: standard deviation of the reference's loss over its seeds; differences are of means"
    yield from verdicts


def cells(of_task: Sequence[Row], own: Sequence[Row], reference: str) -> list[str]:
    name = own[0]["contender"]
    between = differences(of_task, name, reference, "train_loss")
    return [
        spread([row["train_loss"] for row in own], ".4f"),
        "" if name == reference or not between else spread(between, "+.4f"),
        spread([row["held_out_loss"] for row in own], ".4f"),
        f"{fmean(row['held_out_accuracy'] for row in own):.2%}",
        f"{fmean(row['sum_of_v'] for row in own):+.2%}",
        f"{math.sqrt(fmean(row['mean_of_v_rms'] ** 2 for row in own)):.2%}",
        f"{max(row['largest_update'] for row in own):,.1f}",
    ]


def spread(values: Sequence[float], form: str) -> str:
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def verdict(of_task: Sequence[Row], contender: str, reference: str) -> str:
    """WORSE where a loss is higher than the reference's by more than the reference's seeds deviate."""
    said, worse = [], False
    for kind, column in LOSSES.items():
        others = [row[column] for row in chosen(of_task, contender=reference)]
        between = differences(of_task, contender, reference, column)
        if len(others) < 2 or not between:
            return f"{contender} is not judged: one seed has no spread."
        value, of_seeds = fmean(between), stdev(others)
        beyond = abs(value) > of_seeds
        worse |= beyond and value > 0
        where = ("HIGHER" if value > 0 else "lower") + " by more than the spread" if beyond else "within the spread"
        said.append(f"{kind} loss {value:+.4f}, {where} of {of_seeds:.4f}")
    return f"{contender} is {'WORSE' if worse else 'no worse'} than {reference}: {'; '.join(said)}"
