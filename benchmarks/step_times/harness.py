"""The harness of all step times: contenders take turns in rounds; medians, quartiles and conditions go into a CSV.

A command is a list of cases. In a case its contenders take turns step by step, so that a machine whose speed changes
treats them alike; a case's ratios are ratios of medians of these rounds.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.conditions import OtherLoad, conditions, positive, warn_of_other_load, write_rows

T = TypeVar("T")
Row = dict[str, Any]
Step = Callable[[], object]
Seconds = float | Sequence[float]  # a turn may be several steps

WARM_UP_ROUNDS = 2
LEAST_ROUNDS = 5  # however little time there is for them
WIDTH = 130  # of tables where the output is no terminal, which has 80 columns then
REDRAW_SECONDS = 0.2


@dataclass(frozen=True)
class Quartiles:
    q1: float
    median: float
    q3: float

    @staticmethod
    def of(values: Sequence[float]) -> Quartiles:
        ordered = sorted(values)
        middle = (len(ordered) + 1) // 2
        return Quartiles(median(ordered[:middle]), median(ordered), median(ordered[-middle:]))


def interleaved_order(items: Sequence[T], repetition: int) -> list[T]:
    """Returns all items once: forwards, then backwards, then the same rotated by one, and so on.

    So each comes first equally often, and none always finds the caches as the same other one left them.
    """
    start = repetition // 2 % len(items)
    order = [*items[start:], *items[:start]]
    return order[::-1] if repetition % 2 else order


def timed(run: Step, clock: Callable[[], float] = perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def interleaved_times(
    steps: Sequence[Step],
    repeats: float,
    on_round: Callable[[], object] = lambda: None,
    timer: Callable[[Step], Seconds] = timed,
    before: Callable[[], object] = lambda: None,
    budget: float = inf,
) -> list[list[float]]:
    """Returns the seconds that each step took in `repeats` rounds after those that warm up.

    There are fewer rounds, but `LEAST_ROUNDS`, if more would take longer than `budget` seconds. `before` is called
    before each turn and does not count.
    """
    times: list[list[float]] = [[] for _ in steps]
    start, repetition = perf_counter(), -WARM_UP_ROUNDS
    while repetition < repeats and (repetition < LEAST_ROUNDS or perf_counter() - start < budget):
        for index in interleaved_order(range(len(steps)), repetition):
            before()
            seconds = timer(steps[index])
            if repetition >= 0:
                times[index] += [seconds] if isinstance(seconds, float) else seconds
        repetition += 1
        on_round()
    return times


# --- Cases


@dataclass(frozen=True, eq=False)
class Case:
    """Contenders that step the same work. `columns` tell the case from the others in the CSV.

    `build` makes the steps by contender, `peers` names what each one's time is divided by, the first contender unless
    said otherwise. `more` adds columns from a contender's name and the seconds of all. `beside` yields the ids of
    processes that run beside the steps. `times` replaces the harness's own rounds, for steps of several processes.
    """

    title: str
    columns: Row
    build: Callable[[], Mapping[str, Step]]
    repeats: float
    peers: Mapping[str, str] = field(default_factory=dict)
    budget: float = inf
    timer: Callable[[Step], Seconds] = timed
    before: Callable[[], object] = lambda: None
    more: Callable[[str, Mapping[str, list[float]]], Row] = lambda name, times: {}
    beside: Callable[[], AbstractContextManager[Sequence[int]]] = lambda: nullcontext(())
    times: Callable[[Callable[[], object]], Mapping[str, list[float]]] | None = None
    device: str = "cpu"

    def peer(self, contender: str, contenders: Sequence[str]) -> str:
        return self.peers.get(contender, contenders[0])


def measure(case: Case, on_round: Callable[[], object] = lambda: None) -> list[Row]:
    """Returns a row for each contender."""
    steps = {} if case.times else case.build()
    with case.beside() as ours:
        other_load = OtherLoad(ours)
        if case.times:
            times = dict(case.times(on_round))
        else:
            found = interleaved_times(
                list(steps.values()), case.repeats, on_round, case.timer, case.before, case.budget
            )
            times = dict(zip(steps, found, strict=True))
        shared = conditions(other_load, case.device)
    quartiles = {name: Quartiles.of(seconds) for name, seconds in times.items()}
    rows = []
    for name, own in quartiles.items():
        peer = case.peer(name, list(times))
        row = {**case.columns, "contender": name, "repeats": len(times[name])}
        row |= {"median_s": own.median, "q1_s": own.q1, "q3_s": own.q3}
        row |= {"peer": peer, "ratio": own.median / quartiles[peer].median}
        rows.append({**row, **shared, **case.more(name, times)})
    return rows


# --- Commands


def command(name: str, description: str | None, repeats: int | None = None, threads: int | None = 2) -> Any:
    """Returns a parser with the options that commands share: --repeats, --threads and --out."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    if repeats is not None:
        parser.add_argument("--repeats", type=positive, default=repeats, help="rounds; default: %(default)s")
    if threads is not None:
        parser.add_argument("--threads", type=positive, default=threads, help="default: %(default)s")
    out = Path("results") / name
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    return parser


def carry_out(
    name: str,
    cases: Sequence[Case],
    out: Path,
    tables: Callable[[Sequence[Row]], Sequence[Table]],
    plot: Callable[[Path], Path] | None = None,
    threads: int | None = None,
) -> list[Row]:
    """Measures the cases one after another, prints their tables, and writes the CSV and its picture."""
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    rows: list[Row] = []
    with progress_over(cases, console) as on_case:
        for case in cases:
            rows += measure(case, on_case(case))
            gc.collect()  # optimizers are in reference cycles, and the next case needs their memory
    for table in tables(rows):
        console.print(table)
    warn_of_other_load(console, rows)
    path = out / f"{name}.csv"
    write_rows(path, rows)
    wrote = [path, plot(path)] if plot else [path]
    console.print(f"Wrote {' and '.join(map(str, wrote))}", soft_wrap=True)
    return rows


@contextmanager
def progress_over(cases: Sequence[Case], console: Console) -> Iterator[Callable[[Case], Callable[[], None]]]:
    """Shows how far the cases are. Draws between rounds only: a thread that draws would share the cores with them."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("", total=len(cases))
        drawn = 0.0

        def on_case(case: Case) -> Callable[[], None]:
            begun = cases.index(case)
            progress.update(bar, description=case.title, completed=begun, refresh=True)

            def on_round() -> None:
                nonlocal drawn
                progress.advance(bar, 1 / (case.repeats + WARM_UP_ROUNDS))
                if monotonic() - drawn > REDRAW_SECONDS:
                    drawn = monotonic()
                    progress.refresh()

            return on_round

        yield on_case


# --- Tables


def table(
    title: str, headings: Sequence[str], cells: Sequence[Sequence[str]], caption: str = "", wrap: bool = False
) -> Table:
    """`wrap` allows lines within the first column, where all would be wider than 80 columns."""
    result = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        result.add_column(heading, justify="right" if index else "left", no_wrap=not wrap or index > 0)
    for row in cells:
        result.add_row(*row)
    return result


def times_table(rows: Sequence[Row], title: str, caption: str = "", more: Mapping[str, str] | None = None) -> Table:
    """A row for each contender. `more` are further headings and the columns of the CSV that they show."""
    more = more or {}
    cells = []
    for row in rows:
        middle, q1, q3 = (milliseconds(row[key]) for key in ("median_s", "q1_s", "q3_s"))
        others = ("" if row[key] is None else f"{row[key]:.3g}" for key in more.values())
        cells.append([row["contender"], middle, f"{q1} - {q3}", *others, f"{row['ratio']:.2f}"])
    return table(title, ["contender", "median ms", "quartiles ms", *more, "ratio"], cells, caption)


def grouped(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Returns the rows that agree in these columns together, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return list(groups.values())


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
