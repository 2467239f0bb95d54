"""Measures what a step takes beside processes that never sleep, on as many threads as torch takes.

A thread that has lost its core holds up all those that wait for it, for as long as the scheduler lets a neighbour run.
It does so in few steps, but these take many times as long: the mean tells, and the median hides it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from statistics import fmean
from subprocess import PIPE, Popen

from rich.table import Table

from benchmarks.step_times import contenders
from benchmarks.step_times.contenders import CONTENDERS, PEER
from benchmarks.step_times.harness import QUICK_ROUNDS, Case, Row, Times, carry_out, command, crossed
from benchmarks.step_times.suites import SUITES as ALL_SUITES
from benchmarks.step_times.suites import Suite, gpt2_shapes

COMPARED = [CONTENDERS[name] for name in (PEER, "FusedAdamS exact (cpu)", "FusedAdamS lagged (cpu)")]
SUITES = {name: ALL_SUITES[name] for name in ("one-100k", "11x8192", "one-1M")}
SUITES["gpt-2M"] = Suite(tuple(gpt2_shapes(layers=4, width=192, vocabulary=1000, context=64)), QUICK_ROUNDS)
NEIGHBOURS = 0, 1, 2, 4
SECONDS = 5.0  # of a suite beside some neighbours
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
    def means(contender: str, times: Times) -> Row:
        own = fmean(times[contender])
        return {"neighbours": neighbours, "mean_s": own, "ratio_of_means": own / fmean(times[PEER])}

    beside = partial(busy_neighbours, neighbours, seconds + PATIENCE)
    title = f"{suite} beside {neighbours}"
    return contenders.case_of(
        suite, SUITES[suite], COMPARED, title=title, repeats=inf, budget=seconds, more=means, beside=beside
    )


def summary(rows: Sequence[Row]) -> Table:
    title = f"Mean ms of a step beside busy neighbours, {rows[0]['threads']} threads on {rows[0]['cores']} cores"
    return crossed(
        rows,
        title,
        lambda row: f"{row['suite']} beside {row['neighbours']}",
        lambda row: row["contender"],
        lambda row: f"{1e3 * row['mean_s']:.3f} ({row['ratio_of_means']:.2f})",
        f"In brackets: ratio of the means to {PEER}.",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command("busy_machine", __doc__).parse_args(arguments)
    seconds = options.budget or SECONDS
    carry_out(options, [case_of(suite, count, seconds) for suite in SUITES for count in NEIGHBOURS], summary)


if __name__ == "__main__":
    main()
