"""Finished runs of a study: a file that grows by a line as each run ends."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.paper.data.cifar import DataError

Record = Mapping[str, Any]


class Store:
    """Lines of JSON, or with `fields` those of a CSV file, for studies in which a run is one row.

    The file only grows, by whole lines: after a kill at any moment it can be read, and the study goes on.
    """

    def __init__(self, path: Path, fields: Sequence[str] = ()) -> None:
        self.path, self.fields = path, fields

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return list(csv.DictReader(whole)) if self.fields else [json.loads(line) for line in whole]

    def append(self, record: Record) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_bytes() if self.path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # without a line that a kill cut short
        line = io.StringIO()
        if self.fields:
            writer = csv.DictWriter(line, self.fields, extrasaction="ignore", lineterminator="\n")
            if not whole:
                writer.writeheader()
            writer.writerow(record)
        else:
            line.write(json.dumps(record) + "\n")
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
