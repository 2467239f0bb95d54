"""Confidence intervals of means over pairs of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    def shown(self, form: str) -> str:
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def t_interval(values: Sequence[float], comparisons: int = 1) -> Interval:
    """95%; of several comparisons for all of them together (Bonferroni). One value has none: its ends are NaN."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = float(t.ppf(1 - 0.025 / comparisons, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
