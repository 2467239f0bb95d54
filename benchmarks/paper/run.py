"""What a training run is: everything that its result depends on, apart from the machine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from benchmarks.paper.optimizers import OPTIMIZERS

# Part of every run's name. Count it up when training changes, so that results of the old code are not taken for new.
RECIPE = 2


@dataclass(frozen=True)
class Run:
    """A task as long as it has no optimizer.

    `weight_decay` is the paper's lambda; optimizers with AdamW's decay get a thousand times as much, as there.
    """

    data: str
    model: str
    epochs: int
    batch_size: int
    milestones: tuple[int, ...] = ()  # epochs after which lr is divided by ten
    cosine: tuple[int, ...] = ()  # epochs of the first cycle, and how many times longer each next one is
    limit: int = 0  # training images, 0 for all
    augment: bool = False
    held_out: int = 0  # last training images, which are for validation and not trained on
    part: str = "test"  # or "validation": what the run is tested on; the other one is then not even looked at
    evaluate_every: int = 1  # epochs; the last one always
    optimizer: str = ""
    lr: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0

    def run(self, optimizer: str, weight_decay: float, seed: int = 0, lr: float | None = None) -> Run:
        lr = OPTIMIZERS[optimizer].lr if lr is None else lr
        return replace(self, optimizer=optimizer, weight_decay=weight_decay, seed=seed, lr=lr)

    @property
    def task(self) -> str:
        return f"{self.data}/{self.model}"

    @property
    def key(self) -> str:
        """A name for its file: what people look for, and a digest of all that training depends on."""
        digest = hashlib.sha256(json.dumps([RECIPE, asdict(self)], sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.data}-{self.model}-{self.optimizer}-{self.lr:g}-{self.weight_decay:g}-{self.seed}-{digest}"
