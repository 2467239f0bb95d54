"""A run under way on disk, from which it goes on as if it had never been interrupted."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import write_whole
from benchmarks.paper.data.folders import DataError

SAVE_EVERY = 60.0  # seconds: as much as an interruption may cost, beside the window under way


class Checkpoint:
    """Also counts what the run took, interruptions left out: time, and warnings that it gave."""

    def __init__(self, path: Path | None = None, save_every: float = SAVE_EVERY) -> None:
        """`path` None keeps nothing."""
        self.path, self.save_every = path, save_every
        self._began = self._saved = time.monotonic()
        self._before: tuple[float, list[str]] = 0.0, []
        self._caught: list[warnings.WarningMessage] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as self._caught:
            warnings.simplefilter("always")
            yield

    @property
    def seconds(self) -> float:
        return self._before[0] + time.monotonic() - self._began

    @property
    def warnings(self) -> list[str]:
        return self._before[1] + [str(each.message) for each in self._caught]

    def save(self, content: Callable[[], dict[str, Any]], at_once: bool = False) -> None:
        """Saves if it is due."""
        if self.path is None or not (at_once or time.monotonic() - self._saved >= self.save_every):
            return
        whole = {**content(), "seconds": self.seconds, "warnings": self.warnings, "random": random_state()}
        write_whole(self.path, lambda path: torch.save(whole, path))
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Returns what was saved, on the CPU, and restores the generators that dropout draws from."""
        if self.path is None or not self.path.exists():
            return None
        try:
            content: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(
                f"{self.path} cannot be read ({error}), wanted a run that was interrupted. Delete the file to begin "
                "that run anew."
            ) from error
        self._before = content["seconds"], content["warnings"]
        torch.set_rng_state(content["random"]["cpu"])
        if content["random"]["cuda"]:
            torch.cuda.set_rng_state_all(content["random"]["cuda"])
        return content

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def random_state() -> dict[str, Any]:
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": on_gpu}
