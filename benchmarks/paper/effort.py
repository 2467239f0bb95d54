"""What a run took: time, and warnings that it gave. A run that was interrupted goes on counting."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Effort:
    seconds: float = 0.0
    warnings: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        self.seconds += time.perf_counter() - start
        self.warnings += len(caught)
