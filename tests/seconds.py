"""How long `make test` takes, by file: kept in build/ by the run, and printed by `python -m tests.shape`."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "build" / "test-seconds"
BEGUN = time.time()  # when pytest imports it


class Run(NamedTuple):
    name: str
    seconds: float
    load: float  # the mean number of processes that ran or waited, in the last 5 minutes
    files: dict[str, float]

    @property
    def slowest(self) -> tuple[str, float]:
        return max(self.files.items(), key=lambda item: item[1])


def keep(name: str, reports: Iterable[Any]) -> None:
    """Writes down a run of pytest."""
    files: Counter[str] = Counter()
    for report in reports:
        files[report.nodeid.partition("::")[0]] += getattr(report, "duration", 0.0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = {"seconds": time.time() - BEGUN, "load": os.getloadavg()[1], "files": files}
    (FOLDER / f"{name}.json").write_text(json.dumps(kept))


def runs() -> list[Run]:
    """Returns the last run of each name."""
    return [Run(path.stem, **json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]
