"""Paired differences of test errors, their intervals, and the verdict that follows. PLAN.md gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.adams_or_adamw.plan import ADAMS, ADAMW, MARGIN, Row
from benchmarks.adams_or_adamw.training import unpacked
from benchmarks.studies.intervals import Interval

RESAMPLES = 10_000

Array = np.ndarray[Any, Any]


def by_seed(rows: Sequence[Row], arm: str, contender: str) -> dict[int, Row]:
    """The counted runs."""
    return {
        int(row["seed"]): row
        for row in rows
        if (row["arm"], row["role"], row["contender"]) == (arm, "counted", contender)
    }


def pairs(rows: Sequence[Row], arm: str, one: str, other: str) -> list[tuple[Row, Row]]:
    ones, others = by_seed(rows, arm, one), by_seed(rows, arm, other)
    return [(ones[seed], others[seed]) for seed in sorted(ones.keys() & others.keys())]


def error_differences(paired: Sequence[tuple[Row, Row]]) -> Array:
    """In points: a row for each pair, a column for each test image. Positive where only the first one is wrong."""
    return 100 * np.array([wrong(one) - wrong(other) for one, other in paired], dtype=np.float64)


def wrong(row: Row) -> Array:
    return 1 - unpacked(row["correct"], int(row["images"])).astype(np.int8)


def bootstrap(table: Array, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """95%, over rows (pairs of runs) and columns (test images), with the noise of cells counted once.

    Rows' means carry the noise of their cells. Columns' means carry it too, so they are shrunk to the share of their
    variance that is not explained by it. The factor for rows makes up for resampling few of them.
    """
    count, images = table.shape
    mean = float(table.mean())
    row_effects, column_effects = table.mean(1) - mean, table.mean(0) - mean
    residuals = table - mean - row_effects[:, None] - column_effects
    cell_variance = float((residuals**2).sum()) / ((count - 1) * (images - 1))
    column_variance = float((column_effects**2).sum()) / (images - 1)
    explained = min(1.0, cell_variance / count / column_variance) if column_variance else 1.0
    row_effects *= math.sqrt(count / (count - 1))
    column_effects *= math.sqrt(1 - explained)
    random = np.random.default_rng(seed)
    means = np.array(
        [
            mean + random.choice(row_effects, count).mean() + random.choice(column_effects, images).mean()
            for _ in range(resamples)
        ]
    )
    return interval_of(mean, means)


def plain_bootstrap(table: Array, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """95%, from whole rows and columns drawn with replacement: too wide where cells are noisy (Owen 2007)."""
    count, images = table.shape
    random = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        row_weights = random.multinomial(count, np.full(count, 1 / count)) / count
        column_weights = np.bincount(random.integers(images, size=images), minlength=images) / images
        means.append(row_weights @ table @ column_weights)
    return interval_of(float(table.mean()), np.array(means))


def interval_of(mean: float, means: Array) -> Interval:
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(mean, float(low), float(high))


def verdict(interval: Interval, margin: float = MARGIN) -> str:
    """The plan's sentence for an interval of AdamS's test error minus AdamW's."""
    low, high = interval.low, interval.high
    if low <= 0 <= high:
        if max(-low, high) <= margin:
            return f"AdamS and AdamW are equal to within {margin:g} points."
        return f"Undecided: AdamS and AdamW may differ by more than {margin:g} points or not at all."
    better, worse = (ADAMS, ADAMW) if high < 0 else (ADAMW, ADAMS)
    least, most = sorted((abs(low), abs(high)))
    if least > margin:
        return f"{better} is better than {worse} by more than {margin:g} points."
    if most > margin:
        return f"{better} is better than {worse}; whether by more than {margin:g} points is open."
    return f"{better} is better than {worse}, but by less than {margin:g} points."
