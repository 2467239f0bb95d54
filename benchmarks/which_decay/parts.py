"""The parts of the comparison: what is trained in each, for how long, and with how much decay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.studies.runner import Results
from benchmarks.which_decay.contenders import CONTENDERS, DECAYING, NO_DECAY, Contender
from benchmarks.which_decay.lr_schedules import Cosine, LrSchedule, Staircase, stairs

# Part of every run's name. Count it up when training changes, so that results of the old code are not taken for new.
RECIPE = 2


@dataclass(frozen=True)
class Run:
    task: str
    data: str  # tells data from others
    contender: str
    decay: float  # in AdamW's terms
    seed: int
    schedule: LrSchedule
    every: int  # steps in a window; one ends at the end of a stage, too

    @property
    def key(self) -> str:
        """A name for its file: what people look for, and a digest of all it depends on."""
        digest = hashlib.sha256(json.dumps([RECIPE, asdict(self)], sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.task}-{self.contender}-{self.decay:g}-{self.seed}-{digest}"

    @property
    def lengths(self) -> list[int]:
        ends = sorted({*range(self.every, self.schedule.steps, self.every), *self.schedule.ends})
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


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

    def planned(self, data: str, results: Results) -> list[Run]:
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

    And at `too_much`, if given: how a loss suffers from too much decay is told by more seeds as well. The seed that
    has chosen a decay does not judge it: findings are of the others.
    """

    too_much: float | None = None

    def planned(self, data: str, results: Results) -> list[Run]:
        grid = [self.run(c.name, decay, 0, data) for decay in self.decays for c in DECAYING]
        grid.append(self.run(NO_DECAY, 0.0, 0, data))
        chosen = []
        for contender in CONTENDERS:
            own = [run for run in grid if run.contender == contender.name]
            if all(run.key in results for run in own):
                best = min(own, key=lambda run: results[run.key]["points"][-1]["validation_loss"])
                chosen.append((contender.name, best.decay))
        if self.too_much is not None:
            chosen += [(name, self.too_much) for name, _ in chosen if name != NO_DECAY]
        more = [self.run(*each, seed, data) for each in dict.fromkeys(chosen) for seed in range(1, self.seeds)]
        return grid + more


def stairs_part(
    name: str,
    task: str,
    lr: float,
    divisors: Sequence[int],
    decay: float,
    lengths: Sequence[int],
    seeds: int,
    every: int,
) -> Stairs:
    """`lengths` are the shortest stage, and what others are a multiple of: plain, corrected and cautious ones."""
    shortest, plain, corrected, cautious = lengths
    stages = partial(stairs, lr, divisors, shortest)
    schedule = stages(plain, power=1)
    return Stairs(name, task, schedule, (decay,), seeds, every, stages(corrected, power=2), stages(cautious, power=1))


FULL: Sequence[Stairs | Grid] = (
    stairs_part("exponents", "digits", 1e-2, (1, 2, 4, 8, 1), 1.0, (1500, 600, 320, 1400), seeds=3, every=50),
    Grid("gpt", "gpt", Cosine(2e-3, 800, 80), (0.3, 1.0, 3.0), seeds=4, every=40),
    Grid("resnet", "resnet", Cosine(3e-3, 1000, 50), (0.1, 0.3, 1.0, 3.0), 4, 50, too_much=3.0),
    stairs_part("resnet-exponents", "plain resnet", 5e-3, (1, 2, 4), 4.0, (800, 640, 320, 640), seeds=3, every=80),
)

QUICK: Sequence[Stairs | Grid] = (
    stairs_part("exponents", "digits", 1e-2, (1, 2, 3, 1), 20.0, (40, 40, 20, 60), seeds=2, every=20),
    Grid("gpt", "gpt", Cosine(2e-3, 6, 2), (0.1, 1.0), seeds=2, every=2),
    Grid("resnet", "resnet", Cosine(3e-3, 4, 1), (0.1, 1.0), 2, 2, too_much=1.0),
    stairs_part("resnet-exponents", "plain resnet", 5e-3, (1, 2), 2.0, (4, 1, 1, 1), seeds=2, every=2),
)

NAMES = tuple(part.name for part in FULL)
