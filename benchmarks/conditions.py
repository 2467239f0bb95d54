"""Conditions of a measurement, which every row of a CSV carries, and the CSV files themselves."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from time import perf_counter, process_time

import torch
from rich.console import Console

import swd_fused

STAT = Path("/proc/stat")
TOO_MUCH = 0.1  # cores


def conditions(other_load: OtherLoad, device: str = "cpu") -> dict[str, object]:
    """`huge_pages` matters because FusedAdamS asks for them, for its moments, where the system lets programs choose."""
    return {
        "threads": torch.get_num_threads(),
        "device": device,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "other_load": other_load.cores(),
        "huge_pages": huge_pages(),
        "torch": torch.__version__,
        "swd_fused": swd_fused.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def commit() -> str:
    """Returns the source's, and whether it was changed since; nothing where it is no git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def huge_pages() -> str:
    """Returns Linux's mode of transparent huge pages: always, madvise or never."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().partition("[")[2].partition("]")[0] if setting.exists() else ""


# --- The load of other processes
#
# With all cores given to threads, one busy neighbour makes each parallel region wait for the scheduler: on two cores a
# fused AdamW step over 2**20 elements went from 0.9 ms with one thread to 8 ms with two. What has more regions loses
# more, so ratios are wrong too, and a reader must be able to see it.


class OtherLoad:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._busy = _busy_seconds()
        self._own = process_time()

    def count_as_own(self, seconds: float) -> None:
        """Takes off what processes used that are gone, and were none of the others."""
        self._own -= seconds

    def cores(self) -> float | None:
        """Returns the mean number of cores that others kept busy since then, including time stolen from a virtual
        machine; None where the system does not tell. Ticks of 10 ms make it coarse over less than a second."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (process_time() - self._own)
        return max(0.0, others / (perf_counter() - self._start))


def warn_of_other_load(console: Console, rows: Sequence[Mapping[str, object]]) -> None:
    cores = max((float(str(row["other_load"])) for row in rows if row["other_load"] is not None), default=0.0)
    if cores > TOO_MUCH:
        console.print(f"[bold red]Other processes used {cores:.2f} cores meanwhile: do not trust these numbers.")


def _busy_seconds() -> float | None:
    if not STAT.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# --- Files and arguments


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Leaves a whole file or none, whatever ends the process: another path is written to, and then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def positive(text: str) -> int:
    """Type of an argument: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number of at least 1")
    return value
