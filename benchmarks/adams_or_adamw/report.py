"""Prints what the finished runs say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.adams_or_adamw.plan import (
    ADAMS,
    ADAMW,
    ARMS,
    CONTENDERS,
    GRIDS,
    NONE,
    Arm,
    Row,
    mean_errors,
    validation_errors,
)
from benchmarks.adams_or_adamw.statistics import bootstrap, by_seed, error_differences, pairs, plain_bootstrap, verdict
from benchmarks.studies.intervals import t_interval
from benchmarks.studies.tuning import searched

COMPARISONS = ((ADAMS, ADAMW), (NONE, ADAMW), (ADAMS, NONE))
MEASURED = {
    "error": "test error, %",
    "loss": "test loss",
    "train_loss": "training loss",
    "grad_norm": "gradient norm",
    "total_decay": "total decay",
    "weight_norm": "weight norm",
}
FEWEST = 3  # pairs for an interval


def report(rows: Sequence[Row], console: Console) -> None:
    for arm in ARMS.values():
        own = [row for row in rows if row["arm"] == arm.name]
        if own:
            console.print(f"[bold]Arm {arm.name}[/]: {arm.what}", highlight=False)
            for part in parts(arm, own):
                console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def parts(arm: Arm, rows: Sequence[Row]) -> Iterator[str | Table]:
    yield tuning_table(rows)
    if any(row["role"] == "counted" for row in rows):
        yield counted_table(arm, rows)
        yield from (line for line in comparison_lines(arm, rows))
        yield headline(arm, rows)


def tuning_table(rows: Sequence[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Tuning, on validation images", title_justify="left")
    for column in ("optimizer", "weight_decay", "seeds", "error, %", ""):
        table.add_column(column, justify="left" if column in ("optimizer", "") else "right")
    for contender, grid in GRIDS.items():
        errors = validation_errors(rows, contender)
        _, chosen = searched(grid, mean_errors(errors))
        for decay, seeds in sorted(errors.items()):
            mean = f"{100 * fmean(seeds.values()):.2f}"
            table.add_row(contender, f"{decay:g}", str(len(seeds)), mean, "chosen" if decay == chosen else "")
    return table


def counted_table(arm: Arm, rows: Sequence[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Counted runs: mean ± standard deviation over seeds", title_justify="left")
    table.add_column("")
    found = {contender: by_seed(rows, arm.name, contender) for contender in CONTENDERS}
    found = {contender: runs for contender, runs in found.items() if runs}
    for contender, runs in found.items():
        decay = next(iter(runs.values()))["weight_decay"]
        table.add_column(f"{contender} {decay}" if contender != NONE else NONE, justify="right")
    table.add_row("runs", *(str(len(runs)) for runs in found.values()))
    for name, what in MEASURED.items():
        cells = []
        for runs in found.values():
            values = [scaled(name, row) for row in runs.values()]
            spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.4g}{spread}")
        table.add_row(what, *cells)
    return table


def comparison_lines(arm: Arm, rows: Sequence[Row]) -> Iterator[str]:
    for one, other in COMPARISONS:
        paired = pairs(rows, arm.name, one, other)
        if len(paired) < FEWEST:
            yield f"{one} minus {other}: {len(paired)} pairs, too few for an interval"
            continue
        table = error_differences(paired)
        yield (
            f"{one} minus {other}, {len(paired)} pairs: test error {bootstrap(table).shown('+.2f')} points "
            f"(deviation of pairs {table.mean(1).std(ddof=1):.2f}; plain two-way bootstrap "
            f"{plain_bootstrap(table).shown('+.2f')})"
        )
        for name, what in list(MEASURED.items())[1:]:
            values = [scaled(name, a) - scaled(name, b) for a, b in paired]
            yield f"    {what} {t_interval(values).shown('+.3g')}"


def scaled(name: str, row: Row) -> float:
    return (100 if name == "error" else 1) * float(row[name])


def headline(arm: Arm, rows: Sequence[Row]) -> str:
    """The verdict, or how far it is away."""
    paired = pairs(rows, arm.name, ADAMS, ADAMW)
    if len(paired) < FEWEST:
        return f"No verdict yet: {len(paired)} of {arm.pairs} pairs are there."
    said = verdict(bootstrap(error_differences(paired)))
    return said if len(paired) == arm.pairs else f"After {len(paired)} of {arm.pairs} pairs: {said}"
