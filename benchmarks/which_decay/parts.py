"""The parts of the comparison: what is trained in each, for how long, and with how much decay."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

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
class Stairs:
    """Measures exponents: all seeds of one decay.

    Kinds settle at different speeds, so each has stages of its own. `lengthening` is what their lengths are a multiple
    of: for plain kinds, for corrected ones, whose time constant goes as the inverse square of the learning rate, and
    for cautious ones, which decay about half as fast.
    """

    name: str
    task: str
    lr: float
    divisors: tuple[int, ...]
    decay: float
    shortest: int
    lengthening: tuple[int, int, int]
    seeds: int
    every: int

    def planned(self, data: str, results: Results) -> list[Run]:
        """Seeds last, so that an interrupted part has all contenders of the seeds it has begun with."""
        return [
            Run(self.task, data, contender.name, self.decay, seed, self.schedule_of(contender), self.every)
            for seed in range(self.seeds)
            for contender in DECAYING
        ]

    def schedule_of(self, contender: Contender) -> Staircase:
        plain, corrected, cautious = self.lengthening
        lengthening = corrected if contender.corrected else cautious if contender.cautious else plain
        return stairs(self.lr, self.divisors, self.shortest, lengthening, power=2 if contender.corrected else 1)


@dataclass(frozen=True)
class Grid:
    """Compares losses: the grid of decays with seed 0, then more seeds at each contender's best decay.

    And at `too_much`, if given: how a loss suffers from too much decay is told by more seeds as well. The seed that
    has chosen a decay does not judge it: findings are of the others.
    """

    name: str
    task: str
    schedule: Cosine
    decays: tuple[float, ...]
    seeds: int
    every: int
    too_much: float | None = None

    def planned(self, data: str, results: Results) -> list[Run]:
        def run(contender: str, decay: float, seed: int) -> Run:
            return Run(self.task, data, contender, decay, seed, self.schedule, self.every)

        grid = [run(c.name, decay, 0) for decay in self.decays for c in DECAYING] + [run(NO_DECAY, 0.0, 0)]
        chosen = []
        for contender in CONTENDERS:
            own = [run for run in grid if run.contender == contender.name]
            if all(run.key in results for run in own):
                best = min(own, key=lambda run: results[run.key]["points"][-1]["validation_loss"])
                chosen.append((contender.name, best.decay))
        if self.too_much is not None:
            chosen += [(name, self.too_much) for name, _ in chosen if name != NO_DECAY]
        return grid + [run(*each, seed) for each in dict.fromkeys(chosen) for seed in range(1, self.seeds)]


Part = Stairs | Grid
FULL: tuple[Part, ...] = (
    Stairs("exponents", "digits", 1e-2, (1, 2, 4, 8, 1), 1.0, 1500, (600, 320, 1400), seeds=3, every=50),
    Grid("gpt", "gpt", Cosine(2e-3, 800, 80), (0.3, 1.0, 3.0), seeds=4, every=40),
    Grid("resnet", "resnet", Cosine(3e-3, 1000, 50), (0.1, 0.3, 1.0, 3.0), 4, 50, too_much=3.0),
    Stairs("resnet-exponents", "plain resnet", 5e-3, (1, 2, 4), 4.0, 800, (640, 320, 640), seeds=3, every=80),
)
QUICK: tuple[Part, ...] = (
    Stairs("exponents", "digits", 1e-2, (1, 2, 3, 1), 20.0, 40, (40, 20, 60), seeds=2, every=20),
    Grid("gpt", "gpt", Cosine(2e-3, 6, 2), (0.1, 1.0), seeds=2, every=2),
    Grid("resnet", "resnet", Cosine(3e-3, 4, 1), (0.1, 1.0), 2, 2, too_much=1.0),
    Stairs("resnet-exponents", "plain resnet", 5e-3, (1, 2), 2.0, 4, (1, 1, 1), seeds=2, every=2),
)
NAMES = tuple(part.name for part in FULL)
