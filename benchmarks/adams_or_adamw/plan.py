"""Which runs there are: the arms, the grids of decays, and the rule that chooses a decay. PLAN.md gives the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.paper.optimizers import DECOUPLED
from benchmarks.paper.run import Run
from benchmarks.paper.task import Task

ADAMW, ADAMS, NONE = "AdamW", "AdamS", "none"
CONTENDERS = (ADAMW, ADAMS, NONE)
GRIDS = {ADAMW: (0.15, 0.5, 1.5, 5.0, 15.0), ADAMS: (5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2)}  # half a decade apart
MOST_EXTENSIONS = 2
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

    @property
    def key(self) -> tuple[str, ...]:
        return self.arm, self.role, self.contender, f"{self.weight_decay:g}", str(self.seed)

    def run(self, task: Task) -> Run:
        """As benchmarks.paper trains it, which gives AdamW a thousand times the decay that a run names."""
        decay = self.weight_decay if self.contender == ADAMS else self.weight_decay / DECOUPLED
        part = "validation" if self.role == "tuning" else "test"
        return replace(task, part=part).run(ADAMW if self.contender == NONE else self.contender, decay, self.seed)


def key_of(row: Row) -> tuple[str, ...]:
    return row["arm"], row["role"], row["contender"], f"{float(row['weight_decay']):g}", row["seed"]


@dataclass(frozen=True)
class Arm:
    name: str
    what: str
    task: Task
    pairs: int

    def planned(self, rows: Sequence[Row]) -> list[Planned]:
        """All runs that the finished ones let us name, in the order in which they are wanted."""
        own = [row for row in rows if row["arm"] == self.name]
        tuning: list[Planned] = []
        best: dict[str, float] = {NONE: 0.0}
        for contender, grid in GRIDS.items():
            decays, chosen = searched(grid, validation_errors(own, contender))
            tuning += [
                Planned(self.name, "tuning", contender, decay, seed) for decay in decays for seed in TUNING_SEEDS
            ]
            if chosen is not None:
                best[contender] = chosen
        tuning.sort(key=lambda planned: planned.seed)  # stable: a whole grid of the first seed comes first
        counted = [
            Planned(self.name, "counted", contender, best[contender], seed)
            for seed in self.counted_seeds
            for contender in CONTENDERS
            if contender in best
        ]
        return tuning + counted

    @property
    def counted_seeds(self) -> range:
        return range(100, 100 + self.pairs)

    def most_runs(self, rows: Sequence[Row]) -> int:
        """How many there are if no grid is extended again."""
        tuning = sum(planned.role == "tuning" for planned in self.planned(rows))
        return tuning + len(CONTENDERS) * self.pairs


def validation_errors(rows: Sequence[Row], contender: str) -> dict[float, dict[str, float]]:
    """By decay, then by seed."""
    errors: dict[float, dict[str, float]] = {}
    for row in rows:
        if row["role"] == "tuning" and row["contender"] == contender:
            errors.setdefault(float(row["weight_decay"]), {})[row["seed"]] = float(row["error"])
    return errors


def searched(grid: Sequence[float], errors: Mapping[float, Mapping[str, float]]) -> tuple[list[float], float | None]:
    """The decays to try, and the one that is chosen, or None while tuning runs are missing."""
    decays = sorted(grid)
    for extensions in range(MOST_EXTENSIONS + 1):
        if any(len(errors.get(decay, {})) < len(TUNING_SEEDS) for decay in decays):
            return decays, None
        best = min(decays, key=lambda decay: (fmean(errors[decay].values()), decay))
        if best not in (decays[0], decays[-1]) or extensions == MOST_EXTENSIONS:
            return decays, best
        further = 10 * decays[-2] if best == decays[-1] else decays[1] / 10
        decays = sorted([*decays, float(f"{further:.2g}")])
    raise AssertionError("the last round always returns")


PLAIN = Task("cifar10", "large-resnet", 40, 64, (16, 32), limit=8000, evaluate_every=40, held_out=2000)
ARMS = {
    arm.name: arm
    for arm in (
        Arm("A", "8,000 images, 40 epochs, batches of 64", PLAIN, pairs=30),
        Arm(
            "B",
            "8,000 images, augmented, 100 epochs, batches of 64",
            replace(PLAIN, augment=True, epochs=100, milestones=(40, 80), evaluate_every=100),
            pairs=16,
        ),
        Arm("C", "8,000 images, 40 epochs, batches of 32", replace(PLAIN, batch_size=32), pairs=16),
    )
}
