"""The harness of all step times: contenders take turns in rounds; medians, quartiles and conditions go into a CSV.

A command is a list of cases. In a case its contenders take turns step by step, so that a machine whose speed changes
treats them alike; a case's ratios are ratios of medians of these rounds.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import OtherLoad, conditions, positive, warn_of_other_load, write_rows

T = TypeVar("T")
Row = dict[str, Any]
Step = Callable[[], object]
Seconds = float | Sequence[float]  # a turn may be several steps
Times = Mapping[str, list[float]]  # by contender

WARM_UP_ROUNDS = 2
LEAST_ROUNDS = 5  # however little time there is for them
QUICK_ROUNDS = 3
WIDTH = 130  # of tables where the output is no terminal, which has 80 columns then


class Quartiles(NamedTuple):
    q1: float
    median: float
    q3: float


def quartiles(values: Sequence[float]) -> Quartiles:
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
    steps: Mapping[str, Step],
    repeats: float,
    timer: Callable[[Step], Seconds] = timed,
    before: Callable[[], object] = lambda: None,
    budget: float = inf,
) -> Times:
    """Returns the seconds that each step took in `repeats` rounds after those that warm up.

    There are fewer rounds, but `LEAST_ROUNDS`, if more would take longer than `budget` seconds. `before` is called
    before each turn and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    start, repetition = perf_counter(), -WARM_UP_ROUNDS
    while repetition < repeats and (repetition < LEAST_ROUNDS or perf_counter() - start < budget):
        for name in interleaved_order(list(steps), repetition):
            before()
            seconds = timer(steps[name])
            if repetition >= 0:
                times[name] += [seconds] if isinstance(seconds, float) else seconds
        repetition += 1
    return times


# --- Cases


@dataclass(frozen=True, eq=False)
class Case:
    """Contenders that step the same work. `columns` tell the case from the others in the CSV.

    `contenders` make their steps of what `work` returns. `peers` names what each one's time is divided by, the first
    contender unless said otherwise. `more` adds columns from a contender's name and the seconds of all. `times`
    replaces the rounds, for steps of several processes.
    """

    title: str
    columns: Row
    contenders: Mapping[str, Callable[[Any], Step]]
    repeats: float
    work: Callable[[], Any] = lambda: None
    peers: Mapping[str, str] = field(default_factory=dict)
    budget: float = inf
    timer: Callable[[Step], Seconds] = timed
    before: Callable[[], object] = lambda: None
    more: Callable[[str, Times], Row] = lambda name, times: {}
    times: Callable[[Case, OtherLoad], Times] | None = None
    device: str = "cpu"

    def peer(self, contender: str) -> str:
        return self.peers.get(contender, next(iter(self.contenders)))

    def only(self, texts: Sequence[str]) -> Case:
        """Keeps contenders whose names contain one of the texts, and the peers that their ratios need."""
        chosen = {name for name in self.contenders if any(text.lower() in name.lower() for text in texts)}
        chosen |= {self.peer(name) for name in chosen}
        return replace(self, contenders={name: make for name, make in self.contenders.items() if name in chosen})


def measure(case: Case) -> list[Row]:
    """Returns a row for each contender."""
    work = case.work()
    steps = {} if case.times else {name: make(work) for name, make in case.contenders.items()}
    other_load = OtherLoad()
    if case.times:
        times = case.times(case, other_load)
    else:
        times = interleaved_times(steps, case.repeats, case.timer, case.before, case.budget)
    shared = conditions(other_load, case.device)
    found = {name: quartiles(seconds) for name, seconds in times.items()}
    rows = []
    for name, own in found.items():
        peer = case.peer(name)
        row = {**case.columns, "contender": name, "repeats": len(times[name])}
        row |= {"median_s": own.median, "q1_s": own.q1, "q3_s": own.q3}
        row |= {"peer": peer, "ratio": own.median / found[peer].median}
        rows.append({**row, **case.more(name, times), **shared})
    return rows


# --- Commands


def command(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all commands have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.set_defaults(name=name)
    named: dict[str, Any] = {"action": "append", "metavar": "TEXT"}
    parser.add_argument("--case", **named, help="only cases with TEXT in their titles; repeatable")
    parser.add_argument("--contender", **named, help="only those with TEXT in their names, and their peers; repeatable")
    parser.add_argument("--repeats", type=positive, help="rounds of each case")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for the rounds of each case, but five")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few rounds of small tensors: does everything run?")
    out = Path("results") / name
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    return parser


def chosen(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the options ask for, as often as they ask."""
    changes: Row = {"repeats": QUICK_ROUNDS} if options.quick else {}
    changes |= {key: value for key in ("repeats", "budget") if (value := getattr(options, key)) is not None}
    result = [replace(case, **changes).only(options.contender or [""]) for case in cases]
    result = [case for case in result if any(text in case.title for text in options.case or [""]) and case.contenders]
    if not result:
        titles = "".join(f"\n    {case.title}: {', '.join(case.contenders)}" for case in cases)
        raise SystemExit(f"No case has such a title or contender. There are{titles}")
    return result


def carry_out(
    options: argparse.Namespace,
    cases: Sequence[Case],
    summary: Callable[[Sequence[Row]], Table] | None = None,
    plot: Callable[[Path], Path] | None = None,
    show: Mapping[str, str] | None = None,
) -> None:
    """Measures the cases one after another, prints them, and writes the CSV, as each ends, and at last its picture.

    Each case has a table with further columns, `show` by their headings, unless a summary has all cases in one.
    """
    torch.set_num_threads(options.threads)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    cases, rows, path = chosen(cases, options), [], options.out / f"{options.name}.csv"
    for place, case in enumerate(cases):
        # No bar that a thread draws: it would share the cores with the steps.
        print(f"{place + 1} of {len(cases)}: {case.title}", file=sys.stderr, flush=True)
        own = measure(case)
        rows += own
        write_rows(path, rows)
        if not summary:
            console.print(times_table(own, case.title, show or {}))
        gc.collect()  # optimizers are in reference cycles, and the next case needs their memory
    if summary:
        console.print(summary(rows))
    warn_of_other_load(console, rows)
    wrote = [path, plot(path)] if plot else [path]
    console.print(f"Wrote {' and '.join(map(str, wrote))}", soft_wrap=True)


# --- Tables


def table(title: str, headings: Sequence[str], cells: Sequence[Sequence[str]], caption: str = "") -> Table:
    result = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        result.add_column(heading, justify="right" if index else "left")
    for row in cells:
        result.add_row(*row)
    return result


def times_table(rows: Sequence[Row], title: str, show: Mapping[str, str]) -> Table:
    """A row for each contender."""
    cells = []
    for row in rows:
        middle, q1, q3 = (milliseconds(row[key]) for key in ("median_s", "q1_s", "q3_s"))
        others = ("" if row[key] is None else f"{row[key]:.3g}" for key in show.values())
        cells.append([row["contender"], middle, f"{q1} - {q3}", *others, f"{row['ratio']:.2f}"])
    peers = " or ".join(dict.fromkeys(row["peer"] for row in rows))
    headings = ["contender", "median ms", "quartiles ms", *show, "ratio"]
    return table(f"{title}, {rows[0]['repeats']} rounds", headings, cells, f"ratio: to {peers}")


def crossed(rows: Sequence[Row], title: str, down: str, across: str, cell: Callable[[Row], str]) -> Table:
    """A table of two ways, each in the order in which the rows come."""
    names, columns = (dict.fromkeys(str(row[key]) for row in rows) for key in (down, across))
    cells = {(row[down], row[across]): cell(row) for row in rows}
    headings = ["", *(column.replace(" ", "\n") for column in columns)]
    return table(title, headings, [[name, *(cells.get((name, column), "") for column in columns)] for name in names])


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
