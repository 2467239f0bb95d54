"""The small suites under pytest-benchmark: `pytest benchmarks`. Each contender runs by itself, with warm caches."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.contenders import CONTENDERS, Contender, parameters
from benchmarks.suites import SUITES


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
@pytest.mark.parametrize("suite", ["one-1M", "1000x500"])
def test_step_time(benchmark: BenchmarkFixture, suite: str, contender: Contender) -> None:
    benchmark.group = suite
    step = contender.build(parameters(SUITES[suite].shapes))
    benchmark.pedantic(step, rounds=20, warmup_rounds=2)
