"""Which tests `make test` leaves to `make test-all`: those marked slow, and most combinations of parameters where each
case takes long."""

from __future__ import annotations

from collections import defaultdict

import pytest


def mark_thinned(items: list[pytest.Item]) -> None:
    """Marks as slow what a test with many combinations does not need in every run: marked `thinned`, or interpreted."""
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _is_thinned(item):
            cases[item.parent, item.originalname].append(item)
    for of_test in cases.values():
        # By identity: values need be neither hashable nor comparable, and combinations share them.
        kept = covering([{(name, id(value)) for name, value in item.callspec.params.items()} for item in of_test])
        for i, item in enumerate(of_test):
            if i not in kept:
                item.add_marker("slow")


def _is_thinned(item: pytest.Function) -> bool:
    """Triton's interpreter took a quarter of the time of all tests, for the cases that other backends run too."""
    interpreted = str(item.callspec.params.get("backend", "")).startswith("triton")
    return (interpreted or item.get_closest_marker("thinned") is not None) and not item.get_closest_marker("slow")


def covering(cases: list[set[tuple[str, int]]]) -> set[int]:
    """Returns the numbers of few cases that have each value of each parameter once at least."""
    missing = set().union(*cases)
    kept = set()
    while missing:
        most = max(range(len(cases)), key=lambda i: len(cases[i] & missing))
        missing -= cases[most]
        kept.add(most)
    return kept
