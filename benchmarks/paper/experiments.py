"""The experiments by name, and their runs: at the paper's size, at two sizes for two cores, and in seconds on noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.paper.optimizers import OPTIMIZERS
from benchmarks.paper.run import Run
from benchmarks.paper.tuning import Planned, Result, Search

THREE = ("Adam", "AdamW", "AdamS")
TABLE1 = tuple(OPTIMIZERS)
TABLE2 = ("SGD", "AdamS", "Adam", "AMSGrad", "AdamW", "AdaBound", "Padam", "Yogi", "RAdam")
LAMBDA1, LAMBDA2 = 5e-4, 1e-4


EXPERIMENTS = {
    "tuned": "test errors with lambda tuned on a validation part, and at equal total decay (table 1)",
    "tuned-unaugmented": "the same without augmentation",
    "table1": "test errors of all optimizers, lambda 5e-4 (table 1)",
    "table2": "the same with lambda 1e-4 (table 2)",
    "gradnorm": "gradient norms with and without weight decay (figures 2, 3)",
    "schedule": "the schedule, the gradient norm and the loss (figures 4, 5)",
    "basin": "test errors over lr and weight decay (figures 10, 11, 16)",
    "cosine": "cosine annealing with warm restarts (figures 12, 20)",
}

Preset = dict[str, Search | list[Run]]  # runs are without their seeds


def grid(
    tasks: Iterable[Run], optimizers: Sequence[str], decays: Sequence[float], lrs: Sequence[float | None] = (None,)
) -> list[Run]:
    return [
        task.run(optimizer, decay, lr=lr)
        for lr in lrs
        for task in tasks
        for optimizer in optimizers
        for decay in decays
    ]


def planned(experiment: Search | list[Run], seeds: Sequence[int], results: dict[str, Result]) -> list[Planned]:
    """Seeds last, so that an interrupted experiment has all seeds of what it has begun with."""
    if isinstance(experiment, Search):
        return experiment.planned(seeds, results)
    return [Planned(replace(run, seed=seed), "") for run in experiment for seed in seeds]


def cifar10(model: str) -> Run:
    return Run("cifar10", model, 200, 128, (80, 160), augment=True)


RESNET18, VGG16_BN, VGG16 = (cifar10(model) for model in ("resnet18", "vgg16-bn", "vgg16"))
RESNET34 = Run("cifar100", "resnet34", 200, 128, (100, 150), augment=True)
CIFAR = [RESNET18, VGG16_BN, RESNET34]
HELD_OUT = replace(RESNET18, held_out=5000)
HALF_DECADES = dict.fromkeys(THREE, (5e-5, 1.5e-4, 5e-4, 1.5e-3, 5e-3))

PAPER: Preset = {
    "tuned": Search(HELD_OUT, HALF_DECADES),
    "tuned-unaugmented": Search(replace(HELD_OUT, augment=False), HALF_DECADES),
    "table1": grid(CIFAR, TABLE1, [LAMBDA1]),
    "table2": grid(CIFAR, TABLE2, [LAMBDA2]),
    "gradnorm": grid([RESNET18], ("AdamW", "Adam", "SGD"), (0.0, 1e-4, 5e-4, 1e-3))
    + grid([VGG16_BN, VGG16], ["AdamW"], (0.0, 1e-3)),
    "schedule": grid([RESNET18, RESNET34], ["AdamW"], [LAMBDA1])
    + grid([RESNET18, RESNET34], ["AdamS"], (5e-5, 5e-4, 5e-3)),
    "basin": grid([RESNET18], THREE, (5e-5, 1e-4, 5e-4, 1e-3, 5e-3), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2))
    + grid([VGG16_BN, RESNET34], THREE, (5e-5, 1e-4, 5e-4, 1e-3, 5e-3)),
    "cosine": grid(
        [replace(task, epochs=210, milestones=(), cosine=(14, 2)) for task in (RESNET18, VGG16_BN)],
        THREE,
        (1e-4, 5e-4, 1e-3),
    ),
}

DIGITS = Run("digits", "small-resnet", 15, 32, (6, 12))
BN, NO_BN = replace(DIGITS, model="small-vgg-bn"), replace(DIGITS, model="small-vgg")

QUICK: Preset = {
    "table1": grid([DIGITS], TABLE1, [LAMBDA1]),
    "table2": grid([DIGITS], TABLE2, [LAMBDA2]),
    "gradnorm": grid([DIGITS], ("AdamW", "Adam", "SGD"), (0.0, 5e-4, 5e-3)) + grid([BN, NO_BN], ["AdamW"], (0.0, 5e-3)),
    "schedule": grid([DIGITS], ["AdamW"], [LAMBDA1]) + grid([DIGITS], ["AdamS"], (5e-5, 5e-4, 5e-3)),
    "basin": grid([replace(DIGITS, epochs=5, milestones=(2, 4))], THREE, (5e-4, 5e-3, 5e-2), (1e-3, 3e-3, 1e-2)),
    "cosine": grid([replace(DIGITS, epochs=14, milestones=(), cosine=(2, 2))], THREE, (5e-4, 5e-3)),
}

# As the paper trains, with all images of the subset that are not held out.
IMAGES = Run("cifar10-subset", "large-resnet", 30, 64, (12, 24), augment=True, evaluate_every=6, held_out=2000)
# Few images, small batches and no augmentation, so that a short run overfits.
FEW_IMAGES = Run("cifar10-subset", "medium-resnet", 12, 32, (5, 10), limit=4000, evaluate_every=6, held_out=2000)
FROM_15, FROM_5 = (1.5e-4, 5e-4, 1.5e-3, 5e-3), (5e-4, 1.5e-3, 5e-3, 1.5e-2)

REAL: Preset = {
    "tuned": Search(IMAGES, {"Adam": FROM_15, "AdamW": FROM_15, "AdamS": (1.5e-3, 5e-3, 1.5e-2, 5e-2)}),
    "tuned-unaugmented": Search(FEW_IMAGES, {"Adam": FROM_5, "AdamW": FROM_5, "AdamS": (5e-3, 1.5e-2, 5e-2, 1.5e-1)}),
    "gradnorm": grid([FEW_IMAGES], ("AdamW", "Adam"), (0.0, 5e-4, 5e-3)),
}


def tiny(experiment: Search | list[Run]) -> Search | list[Run]:
    """Returns the same experiment on noise, for as few epochs as let it be drawn."""
    if isinstance(experiment, Search):
        decays = {name: decays[:2] for name, decays in experiment.decays.items()}
        return Search(replace(shrunk(experiment.task), held_out=8), decays)
    return list(dict.fromkeys(map(shrunk, experiment)))


def shrunk(run: Run) -> Run:
    epochs, model = max(1, run.epochs // 5), run.model.replace("large", "small")
    changes = {"milestones": (1, 2)[:epochs] if run.milestones else (), "cosine": (1, 2) if run.cosine else ()}
    return replace(run, data="noise", model=model, epochs=epochs, batch_size=8, limit=0, held_out=0, **changes)


PRESETS = {
    "quick": QUICK,
    "real": REAL,
    "paper": PAPER,
    "tiny": {name: tiny(experiment) for name, experiment in {**REAL, **QUICK}.items()},
}
