"""A run under way on disk, so that one that was interrupted goes on where it was, in the middle of an epoch too."""

from __future__ import annotations

import pickle
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import write_whole
from benchmarks.paper.data.folders import DataError
from benchmarks.paper.effort import Effort

SAVE_EVERY = 60.0  # seconds: as much as an interruption may cost


class Checkpoint:
    def __init__(self, path: Path | None, effort: Effort, save_every: float = SAVE_EVERY) -> None:
        """`path` None keeps nothing. What the run took so far is saved from and loaded into `effort`."""
        self.path = path
        self.effort = effort
        self.save_every = save_every
        self._saved = time.monotonic()

    def is_due(self) -> bool:
        return self.path is not None and time.monotonic() - self._saved >= self.save_every

    def save(self, content: dict[str, Any]) -> None:
        assert self.path is not None
        whole = {**content, "effort": asdict(self.effort.so_far()), "random": random_state()}
        write_whole(self.path, lambda path: torch.save(whole, path))
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """On the CPU. What it says of random numbers takes effect with `restore_random`."""
        if self.path is None or not self.path.exists():
            return None
        try:
            content: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(
                f"{self.path} cannot be read ({error}), wanted a run that was interrupted. Delete the file to begin "
                "that run anew."
            ) from error
        self.effort.add(Effort(**content["effort"]))
        return content

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def nothing_kept() -> Checkpoint:
    return Checkpoint(None, Effort())


def random_state() -> dict[str, Any]:
    """Of the generators that dropout draws from."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
