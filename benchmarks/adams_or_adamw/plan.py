"""Which runs there are: the arms, the grids of decays, and the rule that chooses a decay. PLAN.md gives the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.paper import run as paper
from benchmarks.paper.optimizers import DECOUPLED
from benchmarks.studies.tuning import searched

ADAMW, ADAMS, NONE = "AdamW", "AdamS", "none"
CONTENDERS = (ADAMW, ADAMS, NONE)
GRIDS = {ADAMW: (0.15, 0.5, 1.5, 5.0, 15.0), ADAMS: (5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2)}  # half a decade apart
TUNING_SEEDS = (0, 1, 2)
MARGIN = 0.5  # points of test error

Row = Mapping[str, str]


@dataclass(frozen=True)
class Planned:
    """One run. `weight_decay` is what the optimizer is given."""

    arm: str
    role: str  # "tuning", on validation images, or "counted", on test images
    contender: str
    weight_decay: float
    seed: int
    task: paper.Run

    @property
    def key(self) -> str:
        return f"{self.arm} {self.role} {self.contender} {self.weight_decay:g} {self.seed}"

    @property
    def run(self) -> paper.Run:
        """As benchmarks.paper trains it, which gives AdamW a thousand times the decay that a run names."""
        decay = self.weight_decay if self.contender == ADAMS else self.weight_decay / DECOUPLED
        task = replace(self.task, part="validation" if self.role == "tuning" else "test")
        return task.run(ADAMW if self.contender == NONE else self.contender, decay, self.seed)


def key_of(row: Row) -> str:
    return f"{row['arm']} {row['role']} {row['contender']} {float(row['weight_decay']):g} {row['seed']}"


@dataclass(frozen=True)
class Arm:
    name: str
    what: str
    task: paper.Run
    pairs: int

    def planned(self, rows: Sequence[Row]) -> list[Planned]:
        """Returns all runs that the finished ones let us name, in the order in which they are wanted."""
        own = [row for row in rows if row["arm"] == self.name]
        tuning: list[Planned] = []
        best: dict[str, float] = {NONE: 0.0}
        for contender, grid in GRIDS.items():
            decays, chosen = searched(grid, mean_errors(validation_errors(own, contender)))
            tuning += [self._run("tuning", contender, decay, seed) for decay in decays for seed in TUNING_SEEDS]
            if chosen is not None:
                best[contender] = chosen
        tuning.sort(key=lambda planned: planned.seed)  # stable: a whole grid of the first seed comes first
        return tuning + [
            self._run("counted", contender, best[contender], seed)
            for seed in self.counted_seeds
            for contender in CONTENDERS
            if contender in best
        ]

    def _run(self, role: str, contender: str, decay: float, seed: int) -> Planned:
        return Planned(self.name, role, contender, decay, seed, self.task)

    @property
    def counted_seeds(self) -> range:
        return range(100, 100 + self.pairs)


def validation_errors(rows: Sequence[Row], contender: str) -> dict[float, dict[str, float]]:
    """By decay, then by seed."""
    errors: dict[float, dict[str, float]] = {}
    for row in rows:
        if row["role"] == "tuning" and row["contender"] == contender:
            errors.setdefault(float(row["weight_decay"]), {})[str(row["seed"])] = float(row["error"])
    return errors


def mean_errors(errors: Mapping[float, Mapping[str, float]]) -> dict[float, float]:
    """Of decays that all tuning seeds have tried."""
    return {decay: fmean(seeds.values()) for decay, seeds in errors.items() if len(seeds) >= len(TUNING_SEEDS)}


PLAIN = paper.Run("cifar10", "large-resnet", 40, 64, (16, 32), limit=8000, evaluate_every=40, held_out=2000)
AUGMENTED = replace(PLAIN, augment=True, epochs=100, milestones=(40, 80), evaluate_every=100)
ARMS = {
    arm.name: arm
    for arm in (
        Arm("A", "8,000 images, 40 epochs, batches of 64", PLAIN, pairs=30),
        Arm("B", "8,000 images, augmented, 100 epochs, batches of 64", AUGMENTED, pairs=16),
        Arm("C", "8,000 images, 40 epochs, batches of 32", replace(PLAIN, batch_size=32), pairs=16),
    )
}
