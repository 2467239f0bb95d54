"""What an experiment trains: all of a run but the optimizer, its settings and the seed."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.paper.optimizers import OPTIMIZERS
from benchmarks.paper.run import Run


@dataclass(frozen=True)
class Task:
    data: str
    model: str
    epochs: int
    batch_size: int
    milestones: tuple[int, ...] = ()
    cosine: tuple[int, ...] = ()
    limit: int = 0
    augment: bool = False
    held_out: int = 0
    part: str = "test"
    evaluate_every: int = 1
    eigenvalues: int = 0
    hessian_images: int = 0

    @property
    def name(self) -> str:
        return f"{self.data}/{self.model}"

    def run(self, optimizer: str, weight_decay: float, seed: int, lr: float | None = None) -> Run:
        return Run(
            **self.__dict__,
            optimizer=optimizer,
            lr=OPTIMIZERS[optimizer].lr if lr is None else lr,
            weight_decay=weight_decay,
            seed=seed,
        )
