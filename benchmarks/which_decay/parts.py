"""The parts of the comparison: what is trained in each, for how long, with how much decay, and what that shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.studies.rows import Row, chosen
from benchmarks.studies.runner import Results
from benchmarks.which_decay import exponents, losses
from benchmarks.which_decay.contenders import CONTENDERS, DECAYING, NO_DECAY, Contender
from benchmarks.which_decay.runs import LrSchedule, Run, cosine, stairs

Shown = tuple[str, Sequence[str], list[list[str]]]  # a table's title, headings and cells


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
    file, rows = "exponents", staticmethod(exponents.stages)

    def planned(self, data: str, results: Results) -> list[Run]:
        """Seeds last, so that an interrupted part has all contenders of the seeds it has begun with."""
        return [
            Run(self.task, data, contender.name, self.decay, seed, self.schedule_of(contender), self.every)
            for seed in range(self.seeds)
            for contender in DECAYING
        ]

    def schedule_of(self, contender: Contender) -> LrSchedule:
        plain, corrected, cautious = self.lengthening
        lengthening = corrected if contender.corrected else cautious if contender.cautious else plain
        return stairs(self.lr, self.divisors, self.shortest, lengthening, power=2 if contender.corrected else 1)

    def tables(self, rows: Sequence[Row]) -> Iterator[Shown]:
        title = f"{self.name}: exponents of the learning rate, {self.task}, decay {self.decay:g}"
        yield title, exponents.HEADINGS, list(exponents.cells(chosen(rows, task=self.task)))


@dataclass(frozen=True)
class Grid:
    """Compares losses: the grid of decays with seed 0, then more seeds at each contender's best decay.

    And at `too_much`, if given: how a loss suffers from too much decay is told by more seeds as well. The seed that
    has chosen a decay does not judge it: findings are of the others.
    """

    name: str
    task: str
    schedule: LrSchedule
    decays: tuple[float, ...]
    seeds: int
    every: int
    too_much: tuple[float, ...] = ()
    file, rows = "losses", staticmethod(losses.rows_of)

    def planned(self, data: str, results: Results) -> list[Run]:
        def run(contender: str, decay: float, seed: int) -> Run:
            return Run(self.task, data, contender, decay, seed, self.schedule, self.every)

        grid = [run(c.name, decay, 0) for decay in self.decays for c in DECAYING] + [run(NO_DECAY, 0.0, 0)]
        judged = []
        for contender in CONTENDERS:
            own = [run for run in grid if run.contender == contender.name]
            if all(run.key in results for run in own):
                best = min(own, key=lambda run: results[run.key]["points"][-1]["validation_loss"])
                judged.append((contender.name, best.decay))
        judged += [(name, decay) for decay in self.too_much for name, _ in judged if name != NO_DECAY]
        return grid + [run(*each, seed) for each in dict.fromkeys(judged) for seed in range(1, self.seeds)]

    def tables(self, rows: Sequence[Row]) -> Iterator[Shown]:
        for at in (None, *self.too_much):
            where = "the best decay, without the seed that chose it" if at is None else f"a decay of {at:g}"
            title = f"{self.name}: losses at {where}, {self.schedule.steps} steps"
            yield title, losses.HEADINGS, list(losses.cells(losses.findings(rows, self.task, at)))


Part = Stairs | Grid
FULL: tuple[Part, ...] = (
    Stairs("exponents", "digits", 1e-2, (1, 2, 4, 8, 1), 1.0, 1500, (600, 320, 1400), seeds=3, every=50),
    Grid("gpt", "gpt", cosine(2e-3, 800, 80), (0.3, 1.0, 3.0), seeds=4, every=40),
    Grid("resnet", "resnet", cosine(3e-3, 1000, 50), (0.1, 0.3, 1.0, 3.0), 4, 50, too_much=(3.0,)),
    Stairs("resnet-exponents", "plain resnet", 5e-3, (1, 2, 4), 4.0, 800, (640, 320, 640), seeds=3, every=80),
)
QUICK: tuple[Part, ...] = (
    Stairs("exponents", "digits", 1e-2, (1, 2, 3, 1), 20.0, 40, (40, 20, 60), seeds=2, every=20),
    Grid("gpt", "gpt", cosine(2e-3, 6, 2), (0.1, 1.0), seeds=2, every=2),
    Grid("resnet", "resnet", cosine(3e-3, 4, 1), (0.1, 1.0), 2, 2, too_much=(1.0,)),
    Stairs("resnet-exponents", "plain resnet", 5e-3, (1, 2), 2.0, 4, (1, 1, 1), seeds=2, every=2),
)
NAMES = tuple(part.name for part in FULL)
