"""The small suites under pytest-benchmark: `pytest benchmarks`. Each contender runs by itself, with warm caches."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.contenders import CONTENDERS, Contender, parameters, taking_part
from benchmarks.suites import SUITES


@pytest.mark.parametrize(
    ("suite", "contender"),
    [
        pytest.param(suite, contender, id=f"{contender.name}-{suite}")
        for suite in ("one-1M", "1000x500")
        for contender in taking_part(CONTENDERS, SUITES[suite].shapes)
    ],
)
def test_step_time(benchmark: BenchmarkFixture, suite: str, contender: Contender) -> None:
    benchmark.group = suite
    step = contender.build(parameters(SUITES[suite].shapes))
    benchmark.pedantic(step, rounds=20, warmup_rounds=2)
