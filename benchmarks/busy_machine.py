"""Measures what a step takes beside processes that never sleep, on as many threads as torch takes.

A thread that has lost its core holds up all those that wait for it, for as long as the scheduler lets a neighbour run.
It does so in few steps, but these take many times as long: the mean tells, and the median hides it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from subprocess import PIPE, Popen
from time import perf_counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.arguments import not_negative
from benchmarks.conditions import conditions, write_rows
from benchmarks.contenders import CONTENDERS, PEER, Step, parameters
from benchmarks.other_load import OtherLoad, warn_of_other_load
from benchmarks.plot_busy_machine import plot
from benchmarks.suites import SUITES as ALL_SUITES
from benchmarks.suites import Shape, gpt2_shapes
from benchmarks.timing import WARM_UP_ROUNDS, interleaved_order, timed

Row = dict[str, Any]

COMPARED = tuple(c for c in CONTENDERS if c.name in (PEER, "FusedAdamS exact (cpu)", "FusedAdamS lagged (cpu)"))
SUITES: dict[str, tuple[Shape, ...]] = {
    **{name: ALL_SUITES[name].shapes for name in ("one-100k", "11x8192", "one-1M")},
    "gpt-2M": tuple(gpt2_shapes(layers=4, width=192, vocabulary=1000, context=64)),
}
NEIGHBOURS = 0, 1, 2, 4
SECONDS, QUICK_SECONDS = 5.0, 0.05  # of a suite beside some neighbours
LEAST_ROUNDS = 3
PATIENCE = 60.0  # seconds that neighbours live longer than rounds should take

# It ends by itself where nobody is left to end it: at its deadline, or when its parent is another one.
BUSY = """
import os, sys, time
parent, deadline = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
os.write(1, b".")
while time.monotonic() < deadline and os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_neighbours(count: int, seconds: float) -> Iterator[list[Popen[bytes]]]:
    """Yields processes that are busy already, and for `seconds` unless the context ends first."""
    command = [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid()), str(seconds)]
    started: list[Popen[bytes]] = []
    try:
        for _ in range(count):
            each = Popen(command, stdout=PIPE)
            started.append(each)
            assert each.stdout is not None
            each.stdout.read(1)
        yield started
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.communicate()  # waits, and closes the pipe


def times_within(seconds: float, steps: Sequence[Step]) -> list[list[float]]:
    """Returns the seconds that each step took, in as many rounds as fit, and in `LEAST_ROUNDS` at least."""
    times: list[list[float]] = [[] for _ in steps]
    repetition, end = -WARM_UP_ROUNDS, perf_counter() + seconds
    while repetition < LEAST_ROUNDS or perf_counter() < end:
        for index in interleaved_order(range(len(steps)), repetition):
            taken = timed(steps[index])
            if repetition >= 0:
                times[index].append(taken)
        repetition += 1
    return times


def measure(name: str, neighbours: Sequence[int], seconds: float, on_cell: Callable[[], object]) -> list[Row]:
    shapes = SUITES[name]
    params = parameters(shapes)
    steps = [contender.build(params) for contender in COMPARED]
    rows: list[Row] = []
    for count in neighbours:
        with busy_neighbours(count, seconds + PATIENCE) as started:
            other_load = OtherLoad(ours=[each.pid for each in started])
            times = times_within(seconds, steps)
            shared = conditions(other_load)
            if any(each.poll() is not None for each in started):
                raise RuntimeError(f"a neighbour ended before the steps of {name} did")
        means = {contender.name: fmean(own) for contender, own in zip(COMPARED, times, strict=True)}
        rows += [
            {
                "suite": name,
                "neighbours": count,
                "contender": contender.name,
                "elements": sum(param.numel() for param in params),
                "tensors": len(params),
                "mean_ms": 1e3 * means[contender.name],
                "median_ms": 1e3 * median(own),
                "ratio_of_means": means[contender.name] / means[PEER],
                "steps": len(own),
                **shared,
            }
            for contender, own in zip(COMPARED, times, strict=True)
        ]
        on_cell()
    return rows


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    result = Table(
        title=f"Mean ms of a step beside busy neighbours, {first['threads']} threads on {first['cores']} cores",
        caption=f"In brackets: ratio of the means to {PEER}.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    result.add_column("suite", no_wrap=True)
    for heading in ("neighbours", *(contender.name for contender in COMPARED), "steps"):
        result.add_column(heading, justify="right")
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["suite"], row["neighbours"]), []).append(row)
    last = first["suite"]
    for (suite, count), own in cells.items():
        if suite != last:
            result.add_section()
            last = suite
        means = (f"{row['mean_ms']:.3f}" for row in own)
        ratios = ("" if row["contender"] == PEER else f" ({row['ratio_of_means']:.2f})" for row in own)
        texts = (mean + ratio for mean, ratio in zip(means, ratios, strict=True))
        result.add_row(suite, str(count), *texts, f"{own[0]['steps']:,}")
    return result


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.busy_machine", description=__doc__)
    result.add_argument("--suite", action="append", choices=list(SUITES), help="repeatable; default: all")
    result.add_argument(
        "--neighbours",
        type=not_negative,
        nargs="+",
        default=NEIGHBOURS,
        metavar="N",
        help=f"how many busy processes; default: {' '.join(map(str, NEIGHBOURS))}",
    )
    result.add_argument(
        "--seconds", type=float, default=SECONDS, help="for a suite beside N neighbours; default: %(default)s"
    )
    result.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS} seconds each: does everything run?")
    result.add_argument(
        "--out", type=Path, default=Path("results/busy_machine"), metavar="DIR", help="default: %(default)s"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    seconds = QUICK_SECONDS if options.quick else options.seconds
    suites, neighbours = options.suite or list(SUITES), list(dict.fromkeys(options.neighbours))
    console = Console()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between measurements only: by itself it would be drawn in a thread, one more to share the cores with.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(suites) * len(neighbours))
        for name in suites:
            progress.update(task, description=name, refresh=True)
            rows += measure(name, neighbours, seconds, lambda: progress.update(task, advance=1, refresh=True))
            gc.collect()  # optimizers are in reference cycles, and the next suite should find the same free memory
    console.print(table(rows))
    warn_of_other_load(console, max((row["other_load"] for row in rows if row["other_load"] is not None), default=None))
    csv_path = options.out / "busy_machine.csv"
    write_rows(csv_path, rows)
    console.print(f"Wrote {csv_path} and {plot(csv_path)}", soft_wrap=True)


if __name__ == "__main__":
    main()
