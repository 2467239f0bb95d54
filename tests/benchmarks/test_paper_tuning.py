"""Lambda is chosen on validation data alone, and AdamS is given the lambda that removes as much as AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")

from benchmarks.paper import cli
from benchmarks.paper.data import IMAGES, TEXTS, load_images, load_text
from benchmarks.paper.data.images import Tensors
from benchmarks.paper.data.text import Text
from benchmarks.paper.figures.rows import read_rows
from benchmarks.paper.presets import PAPER, REAL, TINY
from benchmarks.paper.run import Run
from benchmarks.paper.runner import Place, run_all
from benchmarks.paper.store import Store
from benchmarks.paper.task import Task
from benchmarks.paper.tuning import Planned, Result, Search, best_of, decay_for, total_decay

pytestmark = pytest.mark.usefixtures("one_thread")


TASK = Task("noise", "small-resnet", 2, 8, held_out=8)
SEEDS = (0, 1, 2)


def made_up(error: Callable[[Run], float], total: Callable[[Run], float]) -> tuple[list[Run], cli.Any]:
    asked: list[Run] = []

    def ask(runs: Sequence[Run]) -> list[Result]:
        asked.extend(runs)
        last = [{"test_error": error(run), "test_loss": math.nan, "summed_decay": total(run) / 2} for run in runs]
        return [{"run": asdict(run), "epochs": [one, one]} for run, one in zip(runs, last, strict=True)]

    return asked, ask


def decades_from(best: dict[str, float]) -> Callable[[Run], float]:
    return lambda run: abs(math.log10(run.weight_decay / best[run.optimizer]))


def weak(run: Run) -> float:
    """AdamS removes a tenth of what AdamW does with the same lambda, and less than in proportion to lambda."""
    return 40 * run.weight_decay**0.9 if run.optimizer == "AdamS" else 1000 * run.weight_decay


SEARCH = Search(TASK, dict.fromkeys(("Adam", "AdamW", "AdamS"), (1e-4, 3e-4, 1e-3, 3e-3)))
BEST = {"Adam": 3e-4, "AdamW": 1e-3, "AdamS": 1e-3}


def finals(planned: list[Planned], role: str) -> set[tuple[str, float]]:
    chosen = [each.run for each in planned if each.role == role]
    for optimizer, decay in {(run.optimizer, run.weight_decay) for run in chosen}:
        seeds = [run.seed for run in chosen if (run.optimizer, run.weight_decay) == (optimizer, decay)]
        assert seeds == list(SEEDS)
    return {(run.optimizer, run.weight_decay) for run in chosen}


def test_the_best_of_each_optimizer_is_run_with_all_seeds() -> None:
    _, ask = made_up(decades_from(BEST), weak)
    planned = SEARCH.plan(SEEDS, ask)
    assert finals(planned, "tuned") == set(BEST.items())
    assert finals(planned, "no decay") == {("Adam", 0.0)}
    assert len({each.run for each in planned if each.role == "tuning"}) == 12


def test_only_validation_runs_are_asked_for_before_all_is_chosen() -> None:
    asked, ask = made_up(decades_from(BEST), weak)
    planned = SEARCH.plan(SEEDS, ask)
    assert {run.part for run in asked} == {"validation"}
    assert {run.seed for run in asked} == {0}
    for run, role in planned:
        assert (run.part == "validation") == (role in ("tuning", "matching"))
        assert run.held_out == 8


def test_a_grid_grows_where_its_best_is_at_an_end() -> None:
    best = {"Adam": 3e-5, "AdamW": 1e-2, "AdamS": 1.0}
    _, ask = made_up(decades_from(best), weak)
    planned = SEARCH.plan(SEEDS, ask)
    tuned = dict(finals(planned, "tuned"))
    assert tuned == {"Adam": 3e-5, "AdamW": 1e-2, "AdamS": 3e-2}  # no more than twice
    tried = sorted({run.weight_decay for run, role in planned if role == "tuning" and run.optimizer == "AdamW"})
    assert tried == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]


def test_adams_is_matched_to_the_decay_of_the_best_adamw() -> None:
    _, ask = made_up(decades_from(BEST), weak)
    [(optimizer, decay)] = finals(SEARCH.plan(SEEDS, ask), "equal decay")
    assert optimizer == "AdamS"
    assert 40 * decay**0.9 == pytest.approx(1.0, rel=0.02)  # AdamW's at 1e-3


def test_lambda_for_a_decay_lies_between_those_known_or_in_proportion_beyond() -> None:
    known = [result(1e-3, 1.0), result(1e-2, 4.0)]
    assert decay_for(2.0, known) == pytest.approx(10**-2.5, rel=0.01)
    assert decay_for(8.0, known) == pytest.approx(2e-2)
    assert decay_for(0.5, known) == pytest.approx(5e-4)


def result(decay: float, total: float = 1.0, error: float = 0.5, loss: float = 1.0) -> Result:
    run = TASK.run("AdamS", decay, 0)
    return {"run": asdict(run), "epochs": [{"test_error": error, "test_loss": loss, "summed_decay": total}]}


def test_runs_that_diverged_are_not_the_best_and_equals_give_the_smallest() -> None:
    results = [result(1.0, error=math.nan, loss=math.nan), result(3.0, error=0.2), result(2.0, error=0.2)]
    assert best_of(results)["run"]["weight_decay"] == 2.0
    by_loss = [result(1.0, error=math.nan, loss=3.0), result(2.0, error=math.nan, loss=2.0)]
    assert best_of(by_loss)["run"]["weight_decay"] == 2.0


@pytest.mark.parametrize(
    "search", [REAL.tuned, REAL.tuned_unaugmented, REAL.tuned_language, PAPER.tuned, PAPER.tuned_language]
)
def test_grids_are_in_half_decades_and_seeded_apart_from_nothing(search: Search) -> None:
    for decays in search.decays.values():
        steps = np.diff(np.log10(sorted(decays)))
        assert len(decays) >= 4
        assert np.allclose(steps, 0.5, atol=0.03)


# --- With real runs


def spoilt_images(root: Path | None) -> Tensors:
    data = ORIGINAL_IMAGES(root)
    return replace(data, test_images=torch.full_like(data.test_images, math.nan), test_labels=-data.test_labels - 1)


def spoilt_text(root: Path | None) -> Text:
    return replace(ORIGINAL_TEXT(root), test=torch.full((100,), 10**9))


ORIGINAL_IMAGES, ORIGINAL_TEXT = IMAGES["noise"], TEXTS["noise-text"]


def forget_data() -> None:
    load_images.cache_clear()
    load_text.cache_clear()


@pytest.mark.parametrize("search", [TINY.tuned, TINY.tuned_language], ids=["images", "text"])
def test_tuning_never_reads_the_test_data(search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With test data that would break any run that looks at them, tuning gives the same numbers."""
    results = []
    for name, images, text in (("whole", ORIGINAL_IMAGES, ORIGINAL_TEXT), ("spoilt", spoilt_images, spoilt_text)):
        forget_data()
        with monkeypatch.context() as patch:
            patch.setitem(IMAGES, "noise", images)
            patch.setitem(TEXTS, "noise-text", text)
            run_all(search.grid(), Place(None, tmp_path / name, "cpu", workers=1), Console(quiet=True))
        store = Store(tmp_path / name)
        results.append(repr([store.load(run)["epochs"] for run in search.grid()]))
    forget_data()
    assert results[0] == results[1]


def test_the_command_writes_what_each_run_was_for(tmp_path: Path) -> None:
    arguments = ["tuned", "--preset", "tiny", "--workers", "1", "--device", "cpu", "--out", str(tmp_path)]
    cli.main(arguments)
    rows = read_rows(tmp_path / "tuned.csv")
    assert {row["role"] for row in rows} == {"tuning", "matching", "tuned", "equal decay", "no decay"}
    assert {(row["role"], row["part"]) for row in rows} >= {("tuning", "validation"), ("tuned", "test")}
    store = Store(tmp_path / "runs")
    equal = {row["weight_decay"] for row in rows if row["role"] == "equal decay"}
    [adamw] = {row["weight_decay"] for row in rows if row["role"] == "tuned" and row["optimizer"] == "AdamW"}
    assert TINY.tuned is not None
    totals = [
        total_decay(store.load(TINY.tuned.validating(optimizer, decay)))
        for optimizer, decay in (("AdamW", adamw), ("AdamS", *equal))
    ]
    assert totals[1] == pytest.approx(totals[0], rel=0.02)
    written = (tmp_path / "tuned.csv").read_bytes()
    cli.main(arguments)  # nothing is left to do
    assert (tmp_path / "tuned.csv").read_bytes() == written
