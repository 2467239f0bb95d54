"""What a training run is, what it measures, and the files it leaves."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import write_whole
from benchmarks.which_decay.lr_schedules import LrSchedule

# Part of every run's name. Count it up when training changes, so that results of the old code are not taken for new.
RECIPE = 1
SAVE_EVERY = 20.0  # seconds: as much as an interruption may cost


@dataclass(frozen=True)
class Run:
    task: str
    data: str
    contender: str
    decay: float  # in AdamW's terms
    seed: int
    schedule: LrSchedule
    every: int  # steps between points

    @property
    def key(self) -> str:
        """A name for its file: what people look for, and a digest of all it depends on."""
        digest = hashlib.sha256(json.dumps([RECIPE, asdict(self)], sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.task}-{self.contender}-{self.decay:g}-{self.seed}-{digest}".replace(" ", "_")


@dataclass(frozen=True)
class Point:
    """Some steps of a run. Norms of gradients are root mean squares over them, of weights as the last one leaves them.

    "Normed" are the layers that a norm follows. `shrink` is the share that decay took from their weights in all these
    steps together; cautious decay took it from some of them only.
    """

    step: int
    steps: int
    lr: float
    train_loss: float
    grad_norm: float
    normed_grad_norm: float
    weight_norm: float
    normed_weight_norm: float
    shrink: float


@dataclass(frozen=True)
class Trained:
    points: list[Point]
    parameters: int
    normed_parameters: int
    validation_loss: float
    test_loss: float
    seconds: float
    warnings: list[str]


class Store:
    """Finished runs on disk, a file each, and what has been saved of unfinished ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, run: Run) -> bool:
        return self._path(run).exists()

    def save(self, run: Run, trained: Trained, conditions: dict[str, object]) -> None:
        content = {"run": asdict(run), "trained": asdict(trained), "conditions": conditions}
        write_whole(self._path(run), lambda path: path.write_text(json.dumps(content)))
        self.checkpoint(run).path.unlink(missing_ok=True)

    def load(self, run: Run) -> tuple[Trained, dict[str, Any]]:
        content = json.loads(self._path(run).read_text())
        points = [Point(**point) for point in content["trained"].pop("points")]
        return Trained(points, **content["trained"]), content["conditions"]

    def checkpoint(self, run: Run) -> Checkpoint:
        return Checkpoint(self._path(run).with_suffix(".pt"))

    def _path(self, run: Run) -> Path:
        return self.folder / f"{run.key}.json"


class Checkpoint:
    """A run under way on disk, from which it goes on as if it had never been interrupted."""

    def __init__(self, path: Path, save_every: float = SAVE_EVERY) -> None:
        self.path = path
        self._save_every = save_every
        self._saved = time.monotonic()

    def save_if_due(self, content: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() - self._saved >= self._save_every:
            write_whole(self.path, lambda path: torch.save(content(), path))
            self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        content: dict[str, Any] = torch.load(self.path, weights_only=True)
        return content
