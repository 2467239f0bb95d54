"""Times of several callables that must be comparable on a machine whose speed wanders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Quartiles:
    q1: float
    median: float
    q3: float

    @staticmethod
    def of(values: Sequence[float]) -> Quartiles:
        ordered = sorted(values)
        middle = (len(ordered) + 1) // 2
        return Quartiles(median(ordered[:middle]), median(ordered), median(ordered[-middle:]))


def interleaved_order(items: Sequence[T], repetition: int) -> list[T]:
    """All items once: forwards, then backwards, then the same rotated by one, and so on.

    So each comes first equally often, and none always finds the caches as the same other one left them.
    """
    start = repetition // 2 % len(items)
    order = [*items[start:], *items[:start]]
    return order[::-1] if repetition % 2 else order


def interleaved_times(
    steps: Sequence[Callable[[], object]],
    repeats: int,
    on_round: Callable[[], object],
    timer: Callable[[Callable[[], object]], float] | None = None,
    before: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds that each step took, in each of `repeats` rounds after the warm-up. `before` each, not counted."""
    times: list[list[float]] = [[] for _ in steps]
    for repetition in range(-WARM_UP_ROUNDS, repeats):
        for index in interleaved_order(range(len(steps)), repetition):
            before()
            seconds = (timer or timed)(steps[index])
            if repetition >= 0:
                times[index].append(seconds)
        on_round()
    return times


def timed(run: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
