"""How much of the machine other processes used during a measurement.

With all cores given to threads, one busy neighbour makes each parallel region wait for the scheduler: on two cores a
fused AdamW step over 2**20 elements went from 0.9 ms with one thread to 8 ms with two. What has more regions loses
more, so ratios are wrong too, and a reader must be able to see it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

from rich.console import Console

STAT = Path("/proc/stat")
TOO_MUCH = 0.1


class OtherLoad:
    """Starts counting when it is made. `ours` are ids of processes that are no others: they must outlive it."""

    def __init__(self, ours: Sequence[int] = ()) -> None:
        self._ours = ours
        self._start = perf_counter()
        self._busy = _busy_seconds()
        self._own = _own_seconds(ours)

    def cores(self) -> float | None:
        """Mean number of cores that others kept busy since then, time stolen from a virtual machine included.

        None where the system does not tell. Ticks of 10 ms make it coarse over less than a second.
        """
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds(self._ours) - self._own)
        return max(0.0, others / (perf_counter() - self._start))


def warn_of_other_load(console: Console, cores: float | None) -> None:
    if cores is not None and cores > TOO_MUCH:
        console.print(f"[bold red]Other processes used {cores:.2f} cores meanwhile: do not trust these numbers.")


def _own_seconds(ours: Sequence[int]) -> float:
    return process_time() + sum(map(_seconds_of, ours))


def _seconds_of(process: int) -> float:
    """Returns 0 where the system does not tell: it does not tell how busy it is then, either."""
    stat = STAT.parent / str(process) / "stat"
    if not STAT.exists():
        return 0.0
    user, system = map(int, stat.read_text().rpartition(")")[2].split()[11:13])  # a name may have spaces
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float | None:
    if not STAT.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
