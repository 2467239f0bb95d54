"""Finished runs on disk, a file each, so that an interrupted command goes on where it was; and CSVs made from them."""

from __future__ import annotations

import csv
import glob
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import swd_fused
from benchmarks.conditions import cpu_model, write_whole
from benchmarks.paper.run import Run
from benchmarks.paper.training import Trained


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, run: Run) -> Path:
        return self.folder / f"{run.key}.json"

    def find(self, run: Run) -> Path | None:
        """A run that also measured eigenvalues serves for the same one without."""
        path = self.path(run)
        if path.exists():
            return path
        return None if run.eigenvalues else next(self.folder.glob(f"{glob.escape(run.key)}+*.json"), None)

    def save(self, run: Run, trained: Trained, conditions: dict[str, Any]) -> None:
        """Whole or not at all: a file that is there is a finished run."""
        content = {"run": asdict(run), **asdict(trained), "conditions": conditions}
        write_whole(self.path(run), lambda path: path.write_text(json.dumps(content)))

    def load(self, run: Run) -> dict[str, Any]:
        path = self.find(run)
        assert path is not None
        return self.content(path)

    def content(self, path: Path) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(path.read_text())
        return content


def conditions(device: torch.device, seconds: float, warnings: int) -> dict[str, Any]:
    """`warnings` counts those of the optimizer, such as that max_decay binds."""
    return {
        "seconds": round(seconds, 2),
        "warnings": warnings,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "swd_fused": swd_fused.__version__,
        "pytorch_optimizer": version("pytorch-optimizer"),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def rows(results: Sequence[dict[str, Any]], which: str) -> Iterator[dict[str, Any]]:
    """Each with the run that it belongs to and the conditions of that."""
    for result in results:
        epochs = result["epochs"]
        if which == "eigenvalues":
            values = [
                {"rank": i, "eigenvalue": value, **epochs[-1]} for i, value in enumerate(result["eigenvalues"], 1)
            ]
        else:
            values = epochs[-1:] if which == "last epoch" else epochs
        for value in values:
            yield {**flat(result["run"]), **shortened(value), **result["conditions"]}


def flat(run: dict[str, Any]) -> dict[str, Any]:
    return {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in run.items()}


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Six digits: the rest is rounding, and differs from machine to machine."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}


def write_csv(path: Path, results: Sequence[dict[str, Any]], which: str, roles: Sequence[str] = ()) -> None:
    """`roles` says what each run is for in an experiment that chooses some of its runs."""
    if roles:
        lines = [{"role": role, **row} for role, one in zip(roles, results, strict=True) for row in rows([one], which)]
    else:
        lines = list(rows(results, which))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=lines[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
