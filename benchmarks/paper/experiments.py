"""The experiments by name: their runs, and which rows of their results go into the CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.paper.presets import TABLE1, TABLE2, THREE, Preset
from benchmarks.paper.run import Run
from benchmarks.paper.task import Task
from benchmarks.paper.tuning import Search

LAMBDA1, LAMBDA2 = 5e-4, 1e-4


@dataclass(frozen=True)
class Experiment:
    what: str
    runs: Callable[[Preset], list[Run]]
    rows: Literal["epochs", "last epoch", "eigenvalues"] = "epochs"
    search: Callable[[Preset], Search | None] = lambda preset: None  # `runs` are then its grid; others follow from it


def product(
    tasks: Iterable[Task | None],
    optimizers: Iterable[str],
    decays: Iterable[float],
    preset: Preset,
    lr: float | None = None,
) -> list[Run]:
    """Seeds last, so that an interrupted experiment has all seeds of what it has begun with."""
    optimizers, decays = tuple(optimizers), tuple(decays)
    return [
        task.run(optimizer, decay, seed, lr)
        for task in tasks
        if task is not None
        for optimizer in optimizers
        for decay in decays
        for seed in preset.seeds
    ]


def table1(preset: Preset) -> list[Run]:
    return product(preset.tables, TABLE1, [LAMBDA1], preset) + product(preset.large, THREE, [LAMBDA1], preset)


def table2(preset: Preset) -> list[Run]:
    return product(preset.tables, TABLE2, [LAMBDA2], preset)


def gradnorm(preset: Preset) -> list[Run]:
    decays = preset.gradnorm_decays
    of_optimizers = product([preset.gradnorm], preset.gradnorm_optimizers, decays, preset)
    return of_optimizers + product(preset.gradnorm_models, ["AdamW"], (*decays[:1], *decays[-1:]), preset)


def schedule(preset: Preset) -> list[Run]:
    return product(preset.schedule, ["AdamW"], [LAMBDA1], preset) + product(
        preset.schedule, ["AdamS"], preset.schedule_decays, preset
    )


def basin(preset: Preset) -> list[Run]:
    grid = [run for lr in preset.basin_lrs for run in product([preset.basin], THREE, preset.basin_decays, preset, lr)]
    return grid + product(preset.basin_lines, THREE, preset.basin_decays, preset)


def sharpness(preset: Preset) -> list[Run]:
    task = [preset.sharpness]
    runs = product(task, ["AdamW"], preset.sharpness_decays, preset)
    runs += product(task, ["AdamS"], with_matched([LAMBDA1], preset), preset)
    return runs + product(task, ["Adam"], [LAMBDA1], preset)


def cosine(preset: Preset) -> list[Run]:
    return product(preset.cosine, THREE, preset.cosine_decays, preset)


def lstm(preset: Preset) -> list[Run]:
    return product([preset.language], THREE, preset.language_decays, preset, preset.language_lr)


def coupling(preset: Preset) -> list[Run]:
    if preset.coupling is None:
        return []
    runs = product([preset.coupling], ("SGD, eq 1", "SGD, eq 3"), preset.coupling_decays, preset)
    for epochs in preset.coupling_epochs:
        shares = (0.4, 0.8) if preset.coupling.milestones else ()
        milestones = tuple(round(share * epochs) for share in shares)
        task = replace(preset.coupling, epochs=epochs, milestones=milestones, evaluate_every=max(1, epochs // 10))
        runs += product([task], ["SGD"], [share / epochs for share in (1.0, 0.1, 0.01)], preset)
    return runs


def tuned(what: str, search: Callable[[Preset], Search | None]) -> Experiment:
    def grid(preset: Preset) -> list[Run]:
        found = search(preset)
        return found.grid() if found else []

    return Experiment(what, grid, search=search)


def with_matched(decays: list[float], preset: Preset) -> list[float]:
    return decays if preset.matched_decay in (0.0, *decays) else [*decays, preset.matched_decay]


EXPERIMENTS: dict[str, Experiment] = {
    "tuned": tuned(
        "test errors with lambda tuned on a validation part, and at equal total decay (table 1)",
        lambda preset: preset.tuned,
    ),
    "tuned-unaugmented": tuned("the same without augmentation", lambda preset: preset.tuned_unaugmented),
    "tuned-lstm": tuned("the same for language modelling (figure 13)", lambda preset: preset.tuned_language),
    "table1": Experiment("test errors of all optimizers, lambda 5e-4 (table 1)", table1),
    "table2": Experiment("the same with lambda 1e-4 (table 2)", table2),
    "gradnorm": Experiment("gradient norms with and without weight decay (figures 2, 3)", gradnorm),
    "schedule": Experiment("the schedule, the gradient norm and the loss (figures 4, 5)", schedule),
    "basin": Experiment("test errors over lr and weight decay (figures 10, 11, 16)", basin, "last epoch"),
    "sharpness": Experiment("top eigenvalues of the Hessian (figures 8, 9)", sharpness, "eigenvalues"),
    "cosine": Experiment("cosine annealing with warm restarts (figures 12, 20)", cosine),
    "lstm": Experiment("language modelling over weight decay (figure 13)", lstm),
    "coupling": Experiment("decay coupled with the lr or not, and the best lambda (figure 1, table 3)", coupling),
}
