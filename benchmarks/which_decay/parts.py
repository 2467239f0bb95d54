"""The parts of the comparison: what is trained in each, for how long, and with how much decay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.which_decay.contenders import CONTENDERS, DECAYING, NO_DECAY
from benchmarks.which_decay.lr_schedules import Cosine, LrSchedule, stairs
from benchmarks.which_decay.run import Run, Store


@dataclass(frozen=True)
class Part:
    """`decays` are in AdamW's terms, and so many in grids that the best one can be seen."""

    name: str
    task: str
    schedule: LrSchedule
    decays: tuple[float, ...]
    seeds: int
    every: int

    def run(self, contender: str, decay: float, seed: int, data: str) -> Run:
        return Run(self.task, data, contender, decay, seed, self.schedule, self.every)


@dataclass(frozen=True)
class Stairs(Part):
    """Measures exponents: all seeds of one decay."""

    def runs(self, data: str) -> list[Run]:
        """Seeds last, so that an interrupted part has all contenders of the seeds it has begun with."""
        decay = self.decays[0]
        return [self.run(c.name, decay, seed, data) for seed in range(self.seeds) for c in DECAYING]


@dataclass(frozen=True)
class Grid(Part):
    """Compares losses: the grid of decays with seed 0, then more seeds at each contender's best decay."""

    def runs(self, data: str) -> list[Run]:
        return [self.run(c.name, decay, 0, data) for decay in self.decays for c in DECAYING] + [
            self.run(NO_DECAY, 0.0, 0, data)
        ]

    def best(self, data: str, store: Store) -> dict[str, float]:
        """By the validation loss. Contenders whose grid is not finished are left out."""
        best = {}
        for contender in CONTENDERS:
            own = [run for run in self.runs(data) if run.contender == contender.name]
            if all(store.has(run) for run in own):
                best[contender.name] = min(own, key=lambda run: store.load(run)[0].validation_loss).decay
        return best

    def more_seeds(self, data: str, store: Store) -> Iterator[Run]:
        best = self.best(data, store)
        for seed in range(1, self.seeds):
            for contender, decay in best.items():
                yield self.run(contender, decay, seed, data)


FULL: Sequence[Stairs | Grid] = (
    Stairs("exponents", "digits", stairs(1e-2, (1, 2, 4, 8, 4, 2, 1), 1500, 300), (1.0,), seeds=5, every=250),
    Grid("gpt", "gpt", Cosine(2e-3, 600, 60), (0.1, 0.3, 1.0, 3.0), seeds=3, every=20),
    Grid("resnet", "resnet", Cosine(3e-3, 1500, 75), (0.03, 0.1, 0.3, 1.0), seeds=3, every=50),
    Stairs("resnet-exponents", "plain resnet", stairs(5e-3, (1, 2, 4, 2, 1), 800, 300), (2.0,), seeds=3, every=200),
)

QUICK: Sequence[Stairs | Grid] = (
    Stairs("exponents", "digits", stairs(1e-2, (1, 2, 4, 1), 40, 10), (5.0,), seeds=2, every=20),
    Grid("gpt", "gpt", Cosine(2e-3, 6, 2), (0.1, 1.0), seeds=2, every=2),
    Grid("resnet", "resnet", Cosine(3e-3, 4, 1), (0.1, 1.0), seeds=2, every=2),
    Stairs("resnet-exponents", "plain resnet", stairs(5e-3, (1, 2), 4, 1), (2.0,), seeds=2, every=2),
)

NAMES = tuple(part.name for part in FULL)
