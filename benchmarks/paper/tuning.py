"""Lambda chosen for each optimizer on the validation part; then runs at it, each tested once on the test part.

Beside the best of each optimizer there is AdamS with the lambda at which it removes as much in total as the best AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper.run import Run
from benchmarks.studies.tuning import searched, tidy

Result = Mapping[str, Any]

MOST_MATCHES = 3
CLOSE_ENOUGH = 0.02

TUNING, MATCHING, TUNED, EQUAL_DECAY, NO_DECAY = "tuning", "matching", "tuned", "equal decay", "no decay"


class Planned(NamedTuple):
    run: Run
    role: str


@dataclass(frozen=True)
class Search:
    """Over lambdas in steps of half a decade, two or more of them, for each optimizer."""

    task: Run
    decays: Mapping[str, tuple[float, ...]]

    def validating(self, optimizer: str, decay: float) -> Run:
        return replace(self.task, part="validation").run(optimizer, decay)

    def planned(self, seeds: Sequence[int], results: Mapping[str, Result]) -> list[Planned]:
        """Returns all runs that the finished ones let us name, those for validation first."""
        tuning, matching, finals, best = list[Planned](), list[Planned](), list[Planned](), dict[str, float]()

        def final(optimizer: str, decay: float, role: str) -> None:
            finals.extend(Planned(self.task.run(optimizer, decay, seed), role) for seed in seeds)

        final("Adam", 0.0, NO_DECAY)
        for optimizer in self.decays:
            decays, chosen = searched(self.decays[optimizer], self.scores(optimizer, results))
            tuning += [Planned(self.validating(optimizer, decay), TUNING) for decay in decays]
            if chosen is not None:
                best[optimizer] = chosen
                final(optimizer, chosen, TUNED)
        if {"AdamW", "AdamS"} <= best.keys():
            target = total_decay(results[self.validating("AdamW", best["AdamW"]).key])
            known = [results[each.run.key] for each in tuning if each.run.optimizer == "AdamS"]
            decay = self.matched(target, known, results, matching)
            if decay is not None:
                final("AdamS", decay, EQUAL_DECAY)
        return tuning + matching + finals

    def scores(self, optimizer: str, results: Mapping[str, Result]) -> dict[float, float]:
        """Of the validation runs that are finished."""
        wanted = self.validating(optimizer, 0.0)
        runs = [(run_of(result), result) for result in results.values()]
        return {
            run.weight_decay: result["points"][-1]["test_error"]
            for run, result in runs
            if replace(run, weight_decay=0.0) == wanted
        }

    def matched(
        self, target: float, known: list[Result], results: Mapping[str, Result], matching: list[Planned]
    ) -> float | None:
        """Returns the lambda of AdamS whose total decay is closest. Plans runs that come closer and closer to it."""
        matches: list[Result] = []
        for _ in range(MOST_MATCHES):
            run = self.validating("AdamS", decay_for(target, known + matches))
            matching.append(Planned(run, MATCHING))
            if run.key not in results:
                return None
            matches.append(results[run.key])
            if distance(total_decay(matches[-1]), target) < CLOSE_ENOUGH:
                break
        closest = min(matches, key=lambda match: distance(total_decay(match), target))
        return run_of(closest).weight_decay


def run_of(result: Result) -> Run:
    values: dict[str, Any] = result["run"]
    return Run(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def total_decay(result: Result) -> float:
    """The sum of lr times decay, in AdamW's terms, over all steps."""
    return math.fsum(point["summed_decay"] for point in result["points"])


def decay_for(total: float, known: Sequence[Result]) -> float:
    """Lambda for a total decay, on lines between the known pairs' logarithms. Beyond them they are proportional."""
    pairs = sorted((math.log(total_decay(result)), math.log(run_of(result).weight_decay)) for result in known)
    totals, decays = zip(*pairs, strict=True)
    wanted = math.log(total)
    within = float(np.interp(wanted, totals, decays))
    beyond = wanted - min(max(wanted, totals[0]), totals[-1])
    return tidy(math.exp(within + beyond), digits=3)


def distance(total: float, target: float) -> float:
    return abs(total / target - 1)
