"""Under which conditions a number was measured: columns that every row of a CSV carries."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import swd_fused
from benchmarks.other_load import OtherLoad


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


def huge_pages() -> str:
    """Linux's mode of transparent huge pages: always, madvise or never."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().partition("[")[2].partition("]")[0] if setting.exists() else ""


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
