"""Answers the project's question below pytest-benchmark's tables: does an exact step keep the paper's claim?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

CLAIM = 1.05  # times AdamW's step: what the paper says
ANSWERS = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Takes the columns that fit into 100 characters, unless others are asked for."""
    config.stash[ANSWERS] = {}
    if getattr(config.option, "benchmark_columns", "absent") is None:
        config.option.benchmark_columns = ["median", "iqr", "rounds"]


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """By suite, the ratio of the exact step to AdamW fused: "plain" and "with clipping"."""
    return request.config.stash[ANSWERS]


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield  # the tables come first
    for suite, ratios in terminalreporter.config.stash[ANSWERS].items():
        said = [f"exact / AdamW fused = {ratios['plain']:.2f}, claim {CLAIM}"] if "plain" in ratios else []
        said += [f"with clipping {ratios['with clipping']:.2f}"] if "with clipping" in ratios else []
        terminalreporter.write_line(f"{suite}: {'; '.join(said)}", bold=True)
