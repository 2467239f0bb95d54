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

    def __post_init__(self) -> None:
        self._began: float | None = None
        self._caught: list[warnings.WarningMessage] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._began, self._caught = time.perf_counter(), caught
            yield
        whole = self.so_far()
        self.seconds, self.warnings, self._began, self._caught = whole.seconds, whole.warnings, None, []

    def so_far(self) -> Effort:
        """With what is being counted."""
        running = 0.0 if self._began is None else time.perf_counter() - self._began
        return Effort(self.seconds + running, self.warnings + len(self._caught))

    def add(self, other: Effort) -> None:
        self.seconds += other.seconds
        self.warnings += other.warnings
