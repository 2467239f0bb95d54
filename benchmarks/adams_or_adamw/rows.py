"""Finished runs: one row each of a CSV file, with the test images that were classified correctly as packed bits."""

from __future__ import annotations

import base64
import csv
import fcntl
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.paper.data import DataError

FIELDS = (
    *("arm", "role", "contender", "weight_decay", "seed", "epochs", "batch_size", "train_images", "images"),
    *("error", "train_loss", "loss", "grad_norm", "total_decay", "final_decay", "weight_norm"),
    *("cpu_seconds", "wall_seconds", "threads", "device", "cpu", "cores", "other_load", "huge_pages"),
    *("torch", "swd_fused", "commit", "python", "date", "data", "correct"),
)


class Rows:
    """`folder`/runs.csv. It only grows, by whole lines: after a kill at any moment it can be read and goes on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "runs.csv"

    def read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return list(csv.DictReader(whole))

    def append(self, row: Mapping[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_bytes() if self.path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # without a line that a kill cut short
        line = io.StringIO()
        writer = csv.DictWriter(line, FIELDS, lineterminator="\n")
        if not whole:
            writer.writeheader()
        writer.writerow(row)
        with self.path.open("ab") as file:
            file.truncate(len(whole))
            file.write(line.getvalue().encode())
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second command from taking the same runs. The lock ends with the process, however that ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"another command is adding runs to {self.path}. Wait for it, end it, or name another --out."
                ) from None
            yield


def packed(correct: np.ndarray) -> str:
    return base64.b64encode(np.packbits(correct.astype(np.uint8)).tobytes()).decode()


def unpacked(text: str, count: int) -> np.ndarray:
    """Booleans."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)
