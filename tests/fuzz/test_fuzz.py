"""A share of the fuzz in each test run. `python -m tests.fuzz --cases N --seed S` runs as many as there is time for."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import failures

CASES = 300
BATCH = 50


@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_cases(first: int) -> None:
    found = [str(failure) for failure in failures(0, range(first, first + BATCH)) if failure is not None]
    assert not found, "\n" + "\n".join(found)


def test_interpreted_kernels() -> None:
    found = [str(failure) for failure in failures(0, range(10), triton=True) if failure is not None]
    assert not found, "\n" + "\n".join(found)
