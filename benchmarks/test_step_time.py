"""Step times under pytest-benchmark: `pytest benchmarks/test_step_time.py`, about two minutes.

pytest-benchmark measures one test after another, so that a machine that changes its speed meanwhile compares itself:
AdamW fused had a mean of 1.5 s beside a median of 0.26. Here all contenders of a suite take turns in the harness's
rounds, and each test hands the seconds of its contender to pytest-benchmark, by a clock that replays them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from statistics import median

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.step_times.contenders import CLIPPED_PEER, CONTENDERS, PEER, parameters
from benchmarks.step_times.harness import Times, interleaved_times
from benchmarks.step_times.suites import SUITES

# Enough for a median, and no more than some seconds of each contender.
ROUNDS = {"one-64M": 11, "gpt2-124m": 11, "resnet50": 31, "one-1M": 201, "1000x500": 101}
SECONDS = 30.0  # for a suite's rounds, of which there are fewer then
EXACT = {"plain": "FusedAdamS exact (cpu)", "with clipping": "FusedAdamS exact + clip (cpu)"}
# Each kind's contenders, AdamW first, with names that leave the tables within 100 columns.
KINDS = {
    "plain": {PEER: "AdamW fused", EXACT["plain"]: "exact", "FusedAdamS lagged (cpu)": "lagged"},
    "with clipping": {CLIPPED_PEER: "AdamW fused + clip", EXACT["with clipping"]: "exact + clip"},
}


class ReplayingClock:
    """A clock that goes on by the seconds of one round whenever a round is replayed."""

    def __init__(self) -> None:
        self._now = 0.0
        self._rounds: Iterator[float] = iter(())

    def load(self, seconds: list[float]) -> None:
        self._now, self._rounds = 0.0, iter(seconds)

    def replay(self) -> None:
        self._now += next(self._rounds)

    def time(self) -> float:
        return self._now


CLOCK = ReplayingClock()


@lru_cache(maxsize=1)
def times_of(suite: str) -> Times:
    """Returns the seconds of each contender, of both kinds in the same rounds."""
    params = parameters(SUITES[suite].shapes)
    steps = {name: CONTENDERS[name].build(params) for names in KINDS.values() for name in names}
    return interleaved_times(steps, ROUNDS[suite], budget=SECONDS)


@pytest.mark.benchmark(timer=CLOCK.time)
@pytest.mark.parametrize(
    ("suite", "kind", "contender"),
    [
        pytest.param(suite, kind, name, id=f"{short}-{suite}")
        for suite in ROUNDS
        for kind, names in KINDS.items()
        for name, short in names.items()
    ],
)
def test_step_time(
    benchmark: BenchmarkFixture, answers: dict[str, dict[str, float]], suite: str, kind: str, contender: str
) -> None:
    times, peer = times_of(suite), next(iter(KINDS[kind]))
    ratio = median(times[contender]) / median(times[peer])
    benchmark.group = f"{suite}, {kind}"
    benchmark.extra_info[f"ratio to {peer}"] = ratio
    if contender == EXACT[kind]:
        answers.setdefault(suite, {})[kind] = ratio
    CLOCK.load(times[contender])
    benchmark.pedantic(CLOCK.replay, rounds=len(times[contender]))
