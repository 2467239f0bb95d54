"""Lambda chosen for each optimizer on the validation part; then runs at it, each tested once on the test part.

Beside the best of each optimizer there is AdamS with the lambda at which it removes as much in total as the best AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper.run import Run
from benchmarks.paper.task import Task

Result = dict[str, Any]
Ask = Callable[[Sequence[Run]], list[Result]]  # carries out those that are not finished

MOST_EXTENSIONS = 2  # of a grid whose best lambda is at its end, for each optimizer
MOST_MATCHES = 3
CLOSE_ENOUGH = 0.02

TUNING, MATCHING, TUNED, EQUAL_DECAY, NO_DECAY = "tuning", "matching", "tuned", "equal decay", "no decay"


class Planned(NamedTuple):
    run: Run
    role: str


@dataclass(frozen=True)
class Search:
    """Over lambdas in steps of half a decade, two or more of them, for each optimizer."""

    task: Task
    decays: dict[str, tuple[float, ...]]
    lr: float | None = None
    seed: int = 0

    def validating(self, optimizer: str, decay: float) -> Run:
        return replace(self.task, part="validation").run(optimizer, decay, self.seed, self.lr)

    def grid(self) -> list[Run]:
        return [self.validating(optimizer, decay) for optimizer, decays in self.decays.items() for decay in decays]

    def finals(self, optimizer: str, decay: float, role: str, seeds: Sequence[int]) -> list[Planned]:
        return [Planned(self.task.run(optimizer, decay, seed, self.lr), role) for seed in seeds]

    def plan(self, seeds: Sequence[int], ask: Ask) -> list[Planned]:
        """All runs, of which those for validation are finished."""
        ask(self.grid())
        tried = {optimizer: self.searched(optimizer, ask) for optimizer in self.decays}
        planned = [Planned(result_run(result), TUNING) for results in tried.values() for result in results]
        best = {optimizer: best_of(results) for optimizer, results in tried.items()}
        planned += self.finals("Adam", 0.0, NO_DECAY, seeds)
        for optimizer, result in best.items():
            planned += self.finals(optimizer, result_run(result).weight_decay, TUNED, seeds)
        if {"AdamW", "AdamS"} <= best.keys():
            matches = self.matched(total_decay(best["AdamW"]), tried["AdamS"], ask)
            planned += [Planned(result_run(match), MATCHING) for match in matches]
            closest = min(matches, key=lambda match: distance(total_decay(match), total_decay(best["AdamW"])))
            planned += self.finals("AdamS", result_run(closest).weight_decay, EQUAL_DECAY, seeds)
        return planned

    def searched(self, optimizer: str, ask: Ask) -> list[Result]:
        """The grid's, and a lambda more at the end where the best one is."""
        decays = sorted(self.decays[optimizer])
        for _ in range(MOST_EXTENSIONS):
            results = ask([self.validating(optimizer, decay) for decay in decays])
            best = result_run(best_of(results)).weight_decay
            if best == decays[-1]:
                decays = [*decays, tidy(10 * decays[-2])]
            elif best == decays[0]:
                decays = [tidy(decays[1] / 10), *decays]
            else:
                return results
        return ask([self.validating(optimizer, decay) for decay in decays])

    def matched(self, target: float, known: list[Result], ask: Ask) -> list[Result]:
        """AdamS with lambdas whose total decay comes closer and closer to that."""
        matches: list[Result] = []
        for _ in range(MOST_MATCHES):
            decay = decay_for(target, [*known, *matches])
            matches += ask([self.validating("AdamS", decay)])
            if distance(total_decay(matches[-1]), target) < CLOSE_ENOUGH:
                break
        return matches


def result_run(result: Result) -> Run:
    values: dict[str, Any] = result["run"]
    return Run(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def score(result: Result) -> float:
    """The error of a classifier, the loss of a language model; infinite where the run diverged."""
    last = result["epochs"][-1]
    value = last["test_loss"] if math.isnan(last["test_error"]) else last["test_error"]
    return math.inf if math.isnan(value) else float(value)


def best_of(results: Sequence[Result]) -> Result:
    """Of equals the one with the smallest lambda."""
    return min(results, key=lambda result: (score(result), result["run"]["weight_decay"]))


def total_decay(result: Result) -> float:
    """The sum of lr times decay, in AdamW's terms, over all steps."""
    return math.fsum(epoch["summed_decay"] for epoch in result["epochs"])


def decay_for(total: float, known: Sequence[Result]) -> float:
    """Lambda for a total decay, on lines between the known pairs' logarithms. Beyond them they are proportional."""
    pairs = sorted((math.log(total_decay(result)), math.log(result["run"]["weight_decay"])) for result in known)
    totals, decays = zip(*pairs, strict=True)
    wanted = math.log(total)
    within = float(np.interp(wanted, totals, decays))
    beyond = wanted - min(max(wanted, totals[0]), totals[-1])
    return tidy(math.exp(within + beyond), digits=3)


def distance(total: float, target: float) -> float:
    return abs(total / target - 1)


def tidy(value: float, digits: int = 2) -> float:
    return float(f"{value:.{digits}g}")
