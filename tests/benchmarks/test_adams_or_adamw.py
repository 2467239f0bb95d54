"""Tests the statistics of benchmarks.adams_or_adamw, the choice of decays, and that it goes on where it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.adams_or_adamw import plan, runner
from benchmarks.adams_or_adamw.plan import ADAMS, ADAMW, ARMS, GRIDS, NONE, Planned, key_of, searched
from benchmarks.adams_or_adamw.plot import plot
from benchmarks.adams_or_adamw.report import headline, report
from benchmarks.adams_or_adamw.rows import FIELDS, Rows, packed, unpacked
from benchmarks.adams_or_adamw.statistics import Interval, bootstrap, error_differences, pairs, plain_bootstrap, verdict
from benchmarks.adams_or_adamw.training import trained
from benchmarks.paper.data import DataError
from benchmarks.paper.optimizers import OPTIMIZERS
from benchmarks.paper.task import Task

IMAGES = 203  # not a whole number of bytes


# --- Statistics


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-1.2, -0.6, "AdamS is better than AdamW by more than 0.5 points."),
        (-0.8, -0.1, "AdamS is better than AdamW; whether by more than 0.5 points is open."),
        (-0.4, -0.1, "AdamS is better than AdamW, but by less than 0.5 points."),
        (-0.4, 0.5, "AdamS and AdamW are equal to within 0.5 points."),
        (-0.6, 0.1, "Undecided: AdamS and AdamW may differ by more than 0.5 points or not at all."),
        (-0.1, 0.6, "Undecided: AdamS and AdamW may differ by more than 0.5 points or not at all."),
        (0.1, 0.4, "AdamW is better than AdamS, but by less than 0.5 points."),
        (0.1, 0.8, "AdamW is better than AdamS; whether by more than 0.5 points is open."),
        (0.6, 1.2, "AdamW is better than AdamS by more than 0.5 points."),
    ],
)
def test_the_verdict_is_the_sentence_of_the_plan(low: float, high: float, said: str) -> None:
    assert verdict(Interval((low + high) / 2, low, high)) == said
    assert said in Path(plan.__file__).with_name("PLAN.md").read_text()


@pytest.mark.parametrize(("seeds", "images", "cells"), [(0.5, 0.0, 45.0), (0.0, 20.0, 20.0), (2.0, 8.0, 45.0)])
def test_the_interval_has_the_width_of_known_variances(seeds: float, images: float, cells: float) -> None:
    random = np.random.default_rng(0)
    rows, columns = 30, 500
    widths, centres = [], []
    for seed in range(20):
        table = (
            0.3
            + seeds * random.standard_normal((rows, 1))
            + images * random.standard_normal(columns)
            + cells * random.standard_normal((rows, columns))
        )
        found = bootstrap(table, resamples=300, seed=seed)
        widths.append(found.high - found.low)
        centres.append(found.mean - table.mean())
    expected = 2 * 1.96 * np.sqrt(seeds**2 / rows + images**2 / columns + cells**2 / rows / columns)
    assert np.mean(widths) == pytest.approx(expected, rel=0.1)  # 20 estimates from 30 rows: ± 3%
    assert centres == pytest.approx([0.0] * len(centres))


def test_the_plain_bootstrap_counts_the_noise_of_cells_three_times() -> None:
    table = np.random.default_rng(0).standard_normal((40, 400))
    narrow, wide = bootstrap(table, 1000), plain_bootstrap(table, 1000)
    assert (wide.high - wide.low) / (narrow.high - narrow.low) == pytest.approx(np.sqrt(3), rel=0.15)


def test_differences_are_in_points_and_positive_where_the_first_one_errs() -> None:
    right, half = np.ones(IMAGES), np.arange(IMAGES) % 2
    one, other = ({"correct": packed(each), "images": str(IMAGES)} for each in (half, right))
    assert unpacked(one["correct"], IMAGES).tolist() == half.astype(bool).tolist()
    table = error_differences([(one, other)])
    assert table.shape == (1, IMAGES)
    assert table.mean() == pytest.approx(100 * (IMAGES - half.sum()) / IMAGES)


# --- The choice of a decay

GRID = (0.15, 0.5, 1.5, 5.0, 15.0)


def errors(best: float, decays: tuple[float, ...]) -> dict[float, dict[str, float]]:
    return {decay: {str(s): abs(np.log(decay / best)) + 0.1 * s for s in plan.TUNING_SEEDS} for decay in decays}


def test_no_decay_is_chosen_before_all_seeds_are_there() -> None:
    there = errors(1.5, GRID)
    del there[0.15]["2"]
    assert searched(GRID, there) == (list(GRID), None)
    assert searched(GRID, errors(1.5, GRID)) == (list(GRID), 1.5)


def test_a_grid_grows_at_the_end_where_the_best_is_at_most_twice() -> None:
    assert searched(GRID, errors(1e9, GRID)) == ([*GRID, 50.0], None)
    assert searched(GRID, errors(50.0, (*GRID, 50.0, 150.0))) == ([*GRID, 50.0, 150.0], 50.0)
    assert searched(GRID, errors(1e9, (*GRID, 50.0, 150.0, 500.0))) == ([*GRID, 50.0, 150.0], 150.0)
    assert searched(GRID, errors(1e-9, GRID)) == ([0.05, *GRID], None)


def test_of_equal_decays_the_smallest_is_chosen() -> None:
    same = {decay: dict.fromkeys("012", 0.3 if decay in (1.5, 5.0) else 0.4) for decay in GRID}
    assert searched(GRID, same)[1] == 1.5


def test_no_seed_tunes_and_counts() -> None:
    assert all(not set(arm.counted_seeds) & set(plan.TUNING_SEEDS) for arm in ARMS.values())


# --- Going on


class Threads(ThreadPoolExecutor):
    """In the place of processes, which would import torch again."""

    def __init__(self, workers: int, context: Any, initializer: Any) -> None:
        super().__init__(workers)


def row_of(planned: Planned) -> dict[str, object]:
    error = 0.4 if planned.weight_decay in (1.5, 5e-3) else 0.45
    correct = np.random.default_rng(planned.seed).random(IMAGES) > error - 0.02 * (planned.contender == ADAMS)
    values = dict.fromkeys(FIELDS, "1") | {
        "arm": planned.arm,
        "role": planned.role,
        "contender": planned.contender,
        "weight_decay": f"{planned.weight_decay:g}",
        "seed": str(planned.seed),
        "error": str(error),
        "images": str(IMAGES),
        "correct": packed(correct),
    }
    return dict(values)


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> plan.Arm:
    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "trained", lambda planned, task, root: row_of(planned))
    return replace(ARMS["A"], pairs=4)


def run(arm: plan.Arm, rows: Rows) -> str:
    console = Console(record=True, quiet=False, width=200)
    with console.capture() as said:
        runner.run_arm(arm, None, rows, 2, console)
    return said.get()


def test_an_interrupted_experiment_repeats_no_run(
    arm: plan.Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parted = Rows(tmp_path / "whole"), Rows(tmp_path / "parted")
    run(arm, whole)
    keys = [key_of(row) for row in whole.read()]
    assert len(keys) == len(set(keys)) == 2 * 5 * 3 + 3 * arm.pairs
    assert {(c, d) for _, role, c, d, _ in keys if role == "counted"} == {(ADAMW, "1.5"), (ADAMS, "0.005"), (NONE, "0")}

    taken: list[tuple[str, ...]] = []

    def ends(planned: Planned, task: Task, root: Path | None) -> dict[str, object]:
        taken.append(planned.key)
        if len(taken) == 34:
            raise KeyboardInterrupt
        return row_of(planned)

    monkeypatch.setattr(runner, "trained", ends)
    with pytest.raises(KeyboardInterrupt):
        run(arm, parted)
    before = [key_of(row) for row in parted.read()]
    assert 31 <= len(before) <= 34
    with parted.path.open("a") as file:
        file.write("A,counted,AdamS")  # a kill amid a row
    run(arm, parted)
    after = [key_of(row) for row in parted.read()]
    assert after[: len(before)] == before
    assert sorted(after) == sorted(keys)


def test_a_second_command_is_refused(arm: plan.Arm, tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    with rows.locked(), pytest.raises(DataError, match="another command is adding runs"):
        run(arm, rows)
    assert rows.read() == []
    run(arm, rows)


def test_partial_rows_can_be_reported_and_drawn(arm: plan.Arm, tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    run(arm, rows)
    order = [planned.key for planned in arm.planned(rows.read())]
    whole = sorted(rows.read(), key=lambda row: order.index(key_of(row)))
    console = Console(width=200)
    for count in (4, 31, 33, 42):  # tuning, one run that counts, a pair, all
        with console.capture() as said:
            report(whole[:count], console)
        assert "Arm A" in said.get()
        assert plot(whole[:count], tmp_path / "picture.png") == (count > 31)
    assert headline(arm, whole[:33]) == "No verdict yet: 1 of 4 pairs are there."
    assert headline(replace(arm, pairs=30), whole).startswith("After 4 of 30 pairs: ")
    assert headline(arm, whole) == verdict(bootstrap(error_differences(pairs(whole, "A", ADAMS, ADAMW))))


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_the_same_again_and_starts_as_its_pair_does() -> None:
    task = Task("noise", "small-resnet", 1, 8, limit=8, held_out=8)  # one step: its loss is that of the first weights
    names = ("error", "train_loss", "loss", "weight_norm", "correct", "data")
    first, again, pair = (
        trained(Planned("A", "counted", contender, 1e-3, 100), task, None) for contender in (ADAMS, ADAMS, ADAMW)
    )
    assert [first[name] for name in names] == [again[name] for name in names]
    assert (first["train_loss"], first["grad_norm"]) == (pair["train_loss"], pair["grad_norm"])
    assert first["weight_norm"] != pair["weight_norm"]
    assert set(first) == set(FIELDS)


def test_adamw_is_given_the_decay_of_the_plan() -> None:
    for contender, decay in ((ADAMW, GRIDS[ADAMW][0]), (ADAMS, GRIDS[ADAMS][0]), (NONE, 0.0)):
        run = Planned("A", "counted", contender, decay, 100).run(ARMS["A"].task)
        optimizer = OPTIMIZERS[run.optimizer].build([torch.nn.Parameter(torch.zeros(2))], run.lr, run.weight_decay)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decay)
        assert type(optimizer).__name__ == ("FusedAdamS" if contender == ADAMS else "AdamW")
