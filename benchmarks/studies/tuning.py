"""The choice of a weight decay from a grid in steps of half a decade, which grows where its best is at an end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_EXTENSIONS = 2


def searched(grid: Sequence[float], scores: Mapping[float, float]) -> tuple[list[float], float | None]:
    """Returns the decays to try, and the one with the lowest score, of equals the smallest: None while scores lack."""
    decays = sorted(grid)
    for extensions in range(MOST_EXTENSIONS + 1):
        if any(decay not in scores for decay in decays):
            return decays, None
        best = min(decays, key=lambda decay: (scores[decay], decay))
        if best not in (decays[0], decays[-1]) or extensions == MOST_EXTENSIONS:
            return decays, best
        decays = sorted([*decays, tidy(10 * decays[-2] if best == decays[-1] else decays[1] / 10)])
    raise AssertionError("the last round always returns")


def tidy(value: float, digits: int = 2) -> float:
    return float(f"{value:.{digits}g}")
