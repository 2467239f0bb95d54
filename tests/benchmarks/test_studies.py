"""Studies go on where they were interrupted, however that was, to the very numbers of one that was not."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")


from benchmarks.paper import cli
from benchmarks.paper.data import DataError
from benchmarks.paper.run import Run
from benchmarks.studies.intervals import t_interval
from benchmarks.studies.runner import Results, Study
from benchmarks.studies.store import Store
from benchmarks.studies.tuning import searched

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
IMAGES = Run("noise", "small-resnet", 4, 8, milestones=(1, 2)).run("AdamS", 5e-3, seed=3)


# --- A study


def test_a_line_that_a_kill_cut_short_is_no_run(tmp_path: Path) -> None:
    for store in (Store(tmp_path / "runs.jsonl"), Store(tmp_path / "runs.csv", ("key", "value"))):
        store.append({"key": "a", "value": 1})
        with store.path.open("a") as file:
            file.write('{"key": "cut"' if not store.fields else "cut,")
        assert [record["key"] for record in store.read()] == ["a"]
        store.append({"key": "b", "value": math.nan, "more": 2} if store.fields else {"key": "b", "value": math.nan})
        assert [record["key"] for record in store.read()] == ["a", "b"]
        assert math.isnan(float(store.read()[1]["value"]))


def study(out: Path, run: Callable[..., Any], keys: str = "abcd", workers: int = 1) -> Study:
    runs = [replace(IMAGES, seed=seed) for seed, _ in enumerate(keys)]

    def planned(results: Results) -> list[Run]:
        """The last run is known only after all others."""
        return runs if all(each.key in results for each in runs[:-1]) else runs[:-1]

    return Study("test", Store(out / "runs.jsonl"), run, planned, workers=workers)


def test_a_study_repeats_no_run_and_plans_from_what_is_finished(tmp_path: Path) -> None:
    taken: list[int] = []

    def take(run: Run) -> dict[str, Any]:
        taken.append(run.seed)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return {"points": []}

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, take).carry_out(Console(quiet=True))
    results = study(tmp_path, take).carry_out(Console(quiet=True))
    assert taken == [0, 1, 2, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == list(results)
    assert all(line["torch"] and line["cpu"] and line["date"] and line["seconds"] >= 0 for line in lines)
    study(tmp_path, take).carry_out(Console(quiet=True))
    assert len(taken) == 5


def test_a_second_command_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.jsonl").locked(), pytest.raises(DataError, match="another command is adding runs"):
        study(tmp_path, lambda *arguments: {}).carry_out(Console(quiet=True))


def arguments(workers: int, out: Path) -> list[str]:
    """A few runs."""
    chosen = ["gradnorm", "--preset", "tiny", "--seeds", "1", "--task", "noise/small-vgg", "--device", "cpu"]
    return [*chosen, "--workers", str(workers), "--out", str(out)]


def points(folder: Path) -> dict[str, str]:
    return {record["key"]: repr(record["points"]) for record in Store(folder / "runs.jsonl").read()}


def test_killed_with_its_workers_a_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.paper", *arguments(2, out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    while not (out / "runs.jsonl").exists() or not (out / "runs.jsonl").read_bytes():
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    cli.main(arguments(2, out))
    cli.main(arguments(1, tmp_path / "whole"))
    assert points(out) == points(tmp_path / "whole")
    assert len(Store(out / "runs.jsonl").read()) == len(points(out))  # no run was taken twice


# --- Choosing and counting

GRID = (0.15, 0.5, 1.5, 5.0, 15.0)


def scores(best: float, decays: tuple[float, ...] = GRID) -> dict[float, float]:
    return {decay: abs(math.log(decay / best)) for decay in decays}


def test_a_decay_is_chosen_when_all_are_there_and_the_grid_grows_at_most_twice() -> None:
    assert searched(GRID, scores(1.5)) == (list(GRID), 1.5)
    assert searched(GRID, scores(1.5, GRID[1:])) == (list(GRID), None)
    assert searched(GRID, dict.fromkeys(GRID, 1.0) | {1.5: 0.3, 5.0: 0.3})[1] == 1.5  # of equals the smallest
    assert searched(GRID, scores(1e9)) == ([*GRID, 50.0], None)
    assert searched(GRID, scores(50.0, (*GRID, 50.0, 150.0))) == ([*GRID, 50.0, 150.0], 50.0)
    assert searched(GRID, scores(1e9, (*GRID, 50.0, 150.0, 500.0))) == ([*GRID, 50.0, 150.0], 150.0)
    assert searched(GRID, scores(1e-9)) == ([0.05, *GRID], None)


def test_intervals_are_students_and_wider_for_several_comparisons() -> None:
    interval = t_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.high) == (2.0, pytest.approx(2 + 4.303 / math.sqrt(3), rel=1e-3))
    assert t_interval([1.0, 2.0, 3.0], comparisons=6).low == pytest.approx(2 - 10.886 / math.sqrt(3), rel=1e-3)
    assert math.isnan(t_interval([1.0]).low)
