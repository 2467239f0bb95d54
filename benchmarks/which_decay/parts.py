"""The parts of the comparison: what is trained in each, for how long, and with how much decay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.which_decay.contenders import CONTENDERS, DECAYING, NO_DECAY, Contender
from benchmarks.which_decay.lr_schedules import Cosine, LrSchedule, Staircase, stairs
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
    """Measures exponents: all seeds of one decay.

    Kinds settle at different speeds. The time constant of corrected ones goes as the inverse square of the learning
    rate, so they have stages of their own, `corrected`; cautious ones decay about half as fast, and have `cautious`.
    """

    corrected: Staircase
    cautious: Staircase

    def runs(self, data: str) -> list[Run]:
        """Seeds last, so that an interrupted part has all contenders of the seeds it has begun with."""
        return [
            replace(self.run(contender.name, self.decays[0], seed, data), schedule=self.schedule_of(contender))
            for seed in range(self.seeds)
            for contender in DECAYING
        ]

    def schedule_of(self, contender: Contender) -> LrSchedule:
        if contender.corrected:
            return self.corrected
        return self.cautious if contender.cautious else self.schedule


@dataclass(frozen=True)
class Grid(Part):
    """Compares losses: the grid of decays with seed 0, then more seeds at each contender's best decay.

    And at `too_much`, if given: how a loss suffers from too much decay is told by more seeds as well.
    """

    too_much: float | None = None

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
        chosen = list(best.items())
        if self.too_much is not None:
            chosen += [(name, self.too_much) for name in best if name != NO_DECAY]
        for contender, decay in dict.fromkeys(chosen):
            for seed in range(1, self.seeds):
                yield self.run(contender, decay, seed, data)


def stairs_part(
    name: str,
    task: str,
    lr: float,
    divisors: Sequence[int],
    decay: float,
    lengths: tuple[int, int, int, int],
    seeds: int,
    every: int,
) -> Stairs:
    """`lengths` are the shortest stage, and what others are a multiple of: plain, corrected and cautious ones."""
    shortest, plain, corrected, cautious = lengths
    return Stairs(
        name,
        task,
        stairs(lr, divisors, shortest, plain, power=1),
        (decay,),
        seeds,
        every,
        stairs(lr, divisors, shortest, corrected, power=2),
        stairs(lr, divisors, shortest, cautious, power=1),
    )


FULL: Sequence[Stairs | Grid] = (
    stairs_part("exponents", "digits", 1e-2, (1, 2, 4, 8, 1), 1.0, (1500, 600, 320, 1400), seeds=3, every=50),
    Grid("gpt", "gpt", Cosine(2e-3, 800, 80), (0.3, 1.0, 3.0), seeds=3, every=40),
    Grid("resnet", "resnet", Cosine(3e-3, 1000, 50), (0.1, 0.3, 1.0, 3.0), 3, 50, too_much=3.0),
    stairs_part("resnet-exponents", "plain resnet", 5e-3, (1, 2, 4), 4.0, (800, 640, 320, 640), seeds=3, every=80),
)

QUICK: Sequence[Stairs | Grid] = (
    stairs_part("exponents", "digits", 1e-2, (1, 2, 3, 1), 20.0, (40, 40, 20, 60), seeds=2, every=20),
    Grid("gpt", "gpt", Cosine(2e-3, 6, 2), (0.1, 1.0), seeds=2, every=2),
    Grid("resnet", "resnet", Cosine(3e-3, 4, 1), (0.1, 1.0), 2, 2, too_much=1.0),
    stairs_part("resnet-exponents", "plain resnet", 5e-3, (1, 2), 2.0, (4, 1, 1, 1), seeds=2, every=2),
)

NAMES = tuple(part.name for part in FULL)
