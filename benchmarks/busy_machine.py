"""Measures what a step takes beside processes that never sleep, on as many threads as torch takes.

A thread that has lost its core holds up all those that wait for it, for as long as the scheduler lets a neighbour run.
It does so in few steps, but these take many times as long: the mean tells, and the median hides it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from statistics import fmean
from subprocess import PIPE, Popen

from rich.table import Table

from benchmarks.step_times.contenders import CONTENDERS, PEER, Step, parameters
from benchmarks.step_times.harness import Case, Row, carry_out, command, grouped, table
from benchmarks.step_times.pictures import plot_busy_machine
from benchmarks.step_times.suites import SUITES as ALL_SUITES
from benchmarks.step_times.suites import Shape, gpt2_shapes

COMPARED = tuple(c for c in CONTENDERS if c.name in (PEER, "FusedAdamS exact (cpu)", "FusedAdamS lagged (cpu)"))
SUITES: dict[str, tuple[Shape, ...]] = {
    **{name: ALL_SUITES[name].shapes for name in ("one-100k", "11x8192", "one-1M")},
    "gpt-2M": tuple(gpt2_shapes(layers=4, width=192, vocabulary=1000, context=64)),
}
NEIGHBOURS = 0, 1, 2, 4
SECONDS, QUICK_SECONDS = 5.0, 0.05  # of a suite beside some neighbours
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
def busy_neighbours(count: int, seconds: float) -> Iterator[list[int]]:
    """Yields the ids of processes that are busy already, and for `seconds` unless the context ends first."""
    command = [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid()), str(seconds)]
    started: list[Popen[bytes]] = []
    try:
        for _ in range(count):
            each = Popen(command, stdout=PIPE)
            started.append(each)
            assert each.stdout is not None
            each.stdout.read(1)
        yield [each.pid for each in started]
        if any(each.poll() is not None for each in started):
            raise RuntimeError("a neighbour ended before the steps did")
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.communicate()  # waits, and closes the pipe


def case_of(suite: str, neighbours: int, seconds: float) -> Case:
    def build() -> Mapping[str, Step]:
        params = parameters(SUITES[suite])
        return {contender.name: contender.build(params) for contender in COMPARED}

    def means(contender: str, times: Mapping[str, list[float]]) -> Row:
        own = fmean(times[contender])
        return {"mean_ms": 1e3 * own, "ratio_of_means": own / fmean(times[PEER])}

    elements = sum(param.numel() for param in parameters(SUITES[suite]))
    columns = {"suite": suite, "neighbours": neighbours, "elements": elements, "tensors": len(SUITES[suite])}
    beside = partial(busy_neighbours, neighbours, seconds + PATIENCE)
    return Case(f"{suite} beside {neighbours}", columns, build, inf, budget=seconds, more=means, beside=beside)


def tables(rows: Sequence[Row]) -> list[Table]:
    cells = []
    for own in grouped(rows, "suite", "neighbours"):
        texts = (
            f"{row['mean_ms']:.3f}" + ("" if row["contender"] == PEER else f" ({row['ratio_of_means']:.2f})")
            for row in own
        )
        cells.append([own[0]["suite"], str(own[0]["neighbours"]), *texts, f"{own[0]['repeats']:,}"])
    first = rows[0]
    title = f"Mean ms of a step beside busy neighbours, {first['threads']} threads on {first['cores']} cores"
    headings = ["suite", "neighbours", *(contender.name for contender in COMPARED), "steps"]
    return [table(title, headings, cells, f"In brackets: ratio of the means to {PEER}.")]


def not_negative(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number of at least 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("busy_machine", __doc__, threads=None)
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="repeatable; default: all")
    parser.add_argument("--neighbours", type=not_negative, nargs="+", default=NEIGHBOURS, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each cell; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS} seconds each: does everything run?")
    options = parser.parse_args(arguments)
    seconds = QUICK_SECONDS if options.quick else options.seconds
    cases = [
        case_of(suite, count, seconds)
        for suite in options.suite or SUITES
        for count in dict.fromkeys(options.neighbours)
    ]
    carry_out("busy_machine", cases, options.out, tables, plot_busy_machine)


if __name__ == "__main__":
    main()
