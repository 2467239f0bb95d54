"""Steps whose gradient norm stands out: the rule of this package, in floats, and ZClip's as it was published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, pvariance


@dataclass
class Rule:
    """`step` takes the norm of a step. Methods in the middle are there to be got wrong."""

    outliers: str
    sigma: float = 6.0
    measured: int = 25
    mean: float = 0.0
    variance: float = 0.0
    counted: int = 0
    in_a_row: int = 0
    found: int = 0
    steps: int = 0
    most_in_a_row: float = 10

    def threshold(self) -> float:
        if self.counted < self.measured:
            return math.inf
        return self.mean + self.sigma * self.deviation()

    def step(self, norm: float, skipped_anyway: bool = False) -> float:
        """Returns what the norm is clipped to, 0 for a step that is skipped."""
        if not math.isfinite(norm) and self.outliers == "skip":
            return 0.0
        if not math.isfinite(norm) or norm == 0 or skipped_anyway:
            return norm
        is_outlier = norm > self.threshold()
        self.steps += 1
        self.found += is_outlier
        if is_outlier and self.outliers == "skip" and self.in_a_row < self.most_in_a_row:
            self.in_a_row += 1
            return 0.0
        self.in_a_row = 0
        taken = self.limit(norm) if is_outlier and self.outliers == "clip" else norm
        self.count(self.entry(norm, taken))
        return taken

    def entry(self, norm: float, taken: float) -> float:
        return taken

    def deviation(self) -> float:
        return math.sqrt(self.variance) + 1e-6 * self.mean

    def limit(self, norm: float) -> float:
        z = (norm - self.mean) / self.deviation()
        return self.mean + self.sigma**2 / z * self.deviation()

    def count(self, norm: float) -> None:
        self.counted += 1
        if self.counted <= self.measured:
            before = self.mean
            self.mean += (norm - before) / self.counted
            self.variance += ((norm - before) * (norm - self.mean) - self.variance) / self.counted
        else:
            self.mean = 0.97 * self.mean + 0.03 * norm
            self.variance = 0.97 * self.variance + 0.03 * (norm - self.mean) ** 2


class SkippedNormsCount(Rule):
    def step(self, norm: float, skipped_anyway: bool = False) -> float:
        taken = super().step(norm, skipped_anyway)
        if taken == 0 < norm:
            self.count(norm)
        return taken


class NormsCountUnclipped(Rule):
    def entry(self, norm: float, taken: float) -> float:
        return norm


class ClipsToThreshold(Rule):
    def limit(self, norm: float) -> float:
        return self.threshold()


WRONG: dict[str, list[Rule]] = {
    "skip": [SkippedNormsCount("skip"), Rule("skip", most_in_a_row=math.inf), Rule("skip", measured=26)],
    "clip": [NormsCountUnclipped("clip"), ClipsToThreshold("clip"), Rule("clip", measured=26)],
}


class ZClip:
    """arXiv 2504.02507 with reciprocal clipping, alpha=0.97 and 25 steps of warm-up."""

    def __init__(self, z: float) -> None:
        self.z, self.norms = z, list[float]()
        self.mean = self.variance = math.nan

    def step(self, norm: float) -> float:
        if len(self.norms) < 25:
            self.norms.append(norm)
            self.mean, self.variance = fmean(self.norms), pvariance(self.norms)
            return norm
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / deviation
        taken = self.mean + self.z**2 * deviation / z if z > self.z else norm
        self.mean = 0.97 * self.mean + 0.03 * taken
        self.variance = 0.97 * self.variance + 0.03 * (taken - self.mean) ** 2
        return taken
