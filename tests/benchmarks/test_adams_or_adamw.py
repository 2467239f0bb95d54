"""Tests the statistics of benchmarks.adams_or_adamw, the choice of decays, and that it goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.adams_or_adamw import cli, plan
from benchmarks.adams_or_adamw.plan import ADAMS, ADAMW, ARMS, GRIDS, NONE, Planned, key_of
from benchmarks.adams_or_adamw.plot import plot
from benchmarks.adams_or_adamw.report import headline, report
from benchmarks.adams_or_adamw.statistics import bootstrap, error_differences, pairs, verdict
from benchmarks.adams_or_adamw.training import FIELDS, packed, trained, unpacked
from benchmarks.paper.optimizers import OPTIMIZERS
from benchmarks.paper.run import Run
from benchmarks.studies.intervals import Interval
from benchmarks.studies.store import Store

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


def test_differences_are_in_points_and_positive_where_the_first_one_errs() -> None:
    right, half = np.ones(IMAGES), np.arange(IMAGES) % 2
    one, other = ({"correct": packed(each), "images": str(IMAGES)} for each in (half, right))
    assert unpacked(one["correct"], IMAGES).tolist() == half.astype(bool).tolist()
    table = error_differences([(one, other)])
    assert table.shape == (1, IMAGES)
    assert table.mean() == pytest.approx(100 * (IMAGES - half.sum()) / IMAGES)


# --- Going on


def test_no_seed_tunes_and_counts() -> None:
    assert all(not set(arm.counted_seeds) & set(plan.TUNING_SEEDS) for arm in ARMS.values())


def test_a_decay_is_scored_when_all_tuning_seeds_have_tried_it() -> None:
    errors = {0.5: {"0": 0.5, "1": 0.3, "2": 0.4}, 1.5: {"0": 0.1, "1": 0.1}}
    assert plan.mean_errors(errors) == {0.5: pytest.approx(0.4)}


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


ARM = replace(ARMS["A"], pairs=4)


def run(store: Store, until: int = 1000) -> list[dict[str, str]]:
    """As `carry_out`, with made-up rows in the place of training."""
    count = 0

    def take(planned: Planned, *rest: object) -> dict[str, object]:
        nonlocal count
        count += 1
        if count > until:
            raise KeyboardInterrupt
        return row_of(planned)

    study = cli.study(ARM, None, store.path.parent, workers=1)
    study.train = take
    study.carry_out(Console(quiet=True))
    return store.read()


def test_an_interrupted_experiment_repeats_no_run(tmp_path: Path) -> None:
    whole, parted = (Store(tmp_path / name / "runs.csv", FIELDS) for name in ("whole", "parted"))
    keys = [key_of(row) for row in run(whole)]
    assert len(keys) == len(set(keys)) == 2 * 5 * 3 + 3 * ARM.pairs
    counted = {tuple(key.split()[2:4]) for key in keys if "counted" in key}
    assert counted == {(ADAMW, "1.5"), (ADAMS, "0.005"), (NONE, "0")}
    with pytest.raises(KeyboardInterrupt):
        run(parted, until=33)
    before = [key_of(row) for row in parted.read()]
    assert len(before) == 33
    with parted.path.open("a") as file:
        file.write("A,counted,AdamS")  # a kill amid a row
    after = [key_of(row) for row in run(parted)]
    assert after[: len(before)] == before
    assert after == keys


def test_partial_rows_can_be_reported_and_drawn(tmp_path: Path) -> None:
    whole = run(Store(tmp_path / "runs.csv", FIELDS))
    console = Console(width=200)
    for count in (4, 31, 33, 42):  # tuning, one run that counts, a pair, all
        with console.capture() as said:
            report(whole[:count], console)
        assert "Arm A" in said.get()
        assert plot(whole[:count], tmp_path / "picture.png") == (count > 31)
    assert headline(ARM, whole[:33]) == "No verdict yet: 1 of 4 pairs are there."
    assert headline(replace(ARM, pairs=30), whole).startswith("After 4 of 30 pairs: ")
    assert headline(ARM, whole) == verdict(bootstrap(error_differences(pairs(whole, "A", ADAMS, ADAMW))))


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_the_same_again_and_starts_as_its_pair_does() -> None:
    task = Run("noise", "small-resnet", 1, 8, limit=8, held_out=8)  # one step: its loss is that of the first weights
    names = ("error", "train_loss", "loss", "weight_norm", "correct", "data")
    first, again, pair = (
        trained(Planned("A", "counted", contender, 1e-3, 100, task), None) for contender in (ADAMS, ADAMS, ADAMW)
    )
    assert [first[name] for name in names] == [again[name] for name in names]
    assert (first["train_loss"], first["grad_norm"]) == (pair["train_loss"], pair["grad_norm"])
    assert first["weight_norm"] != pair["weight_norm"]
    assert set(first) <= set(FIELDS)


def test_adamw_is_given_the_decay_of_the_plan() -> None:
    for contender, decay in ((ADAMW, GRIDS[ADAMW][0]), (ADAMS, GRIDS[ADAMS][0]), (NONE, 0.0)):
        run = Planned("A", "counted", contender, decay, 100, ARMS["A"].task).run
        optimizer = OPTIMIZERS[run.optimizer].build([torch.nn.Parameter(torch.zeros(2))], run.lr, run.weight_decay)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decay)
        assert type(optimizer).__name__ == ("FusedAdamS" if contender == ADAMS else "AdamW")
