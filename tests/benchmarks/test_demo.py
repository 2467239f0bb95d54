"""The demo runs to its end and writes what it says. How fast or how well is not judged here."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from benchmarks import demo, demo_plot

MEASURES = ("step", "epoch", "lr", "train_loss", "grad_norm", "rms_grad", "weight_decay", "step_us")
CONDITIONS = ("seed", "batch_size", "parameters", "threads", "machine", "python", "torch", "swd_fused")
BATCH_SIZE = 128
STEPS = demo.TRAIN_SIZE // BATCH_SIZE * 2

Rows = Sequence[dict[str, str]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "new folder"


@pytest.fixture(scope="module")
def printed(out: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        console = demo.Console(record=True, width=80)
        patch.setattr(demo, "Console", lambda: console)
        demo.main(["--epochs", "2", "--batch-size", str(BATCH_SIZE), "--out", str(out)])
    return console.export_text()


@pytest.fixture(scope="module")
def rows(printed: str, out: Path) -> Rows:
    with (out / "steps.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows_of(rows: Rows, optimizer: str) -> Rows:
    return [row for row in rows if row["optimizer"] == optimizer]


def test_table_names_both_optimizers(printed: str) -> None:
    for text in ("AdamW", "FusedAdamS", "weight", "loss", "gradient", "accuracy", "time", "ratio"):
        assert text in printed


def test_csv_has_a_row_for_each_step_of_each_optimizer(rows: Rows) -> None:
    assert list(rows[0]) == ["optimizer", *MEASURES, *CONDITIONS]
    for optimizer in ("AdamW", "FusedAdamS"):
        assert [int(row["step"]) for row in rows_of(rows, optimizer)] == list(range(1, STEPS + 1))


def test_csv_is_finite_and_complete(rows: Rows) -> None:
    assert all(math.isfinite(float(row[measure])) for row in rows for measure in MEASURES)
    assert all(row[condition] for row in rows for condition in CONDITIONS)


def test_both_start_alike_and_part_after(rows: Rows) -> None:
    adamw, adams = rows_of(rows, "AdamW"), rows_of(rows, "FusedAdamS")
    for measure in ("train_loss", "grad_norm", "rms_grad"):
        assert float(adamw[0][measure]) == pytest.approx(float(adams[0][measure]), rel=1e-5)
        assert adamw[-1][measure] != adams[-1][measure]


def test_learning_rate_is_divided_by_ten_twice(rows: Rows) -> None:
    for optimizer in ("AdamW", "FusedAdamS"):
        rates = dict.fromkeys(float(row["lr"]) for row in rows_of(rows, optimizer))
        assert list(rates) == pytest.approx([1e-3, 1e-4, 1e-5])


def test_only_adams_schedules_its_weight_decay(rows: Rows) -> None:
    assert {float(row["weight_decay"]) for row in rows_of(rows, "AdamW")} == {demo.ADAMW_WEIGHT_DECAY}
    assert len({row["weight_decay"] for row in rows_of(rows, "FusedAdamS")}) == STEPS


def test_picture_is_written_and_its_place_printed(printed: str, out: Path) -> None:
    picture = out / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in printed.replace("\n", "")


def test_picture_can_be_drawn_again_from_the_csv(rows: Rows, out: Path, tmp_path: Path) -> None:
    picture = tmp_path / "again" / "demo.png"
    demo_plot.main(["--table", str(out / "steps.csv"), "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_legends_cover_nothing(rows: Rows, out: Path) -> None:
    figure = demo_plot.figure_of(demo_plot.read_steps(out / "steps.csv"))
    figure.draw_without_rendering()
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert not legend.overlaps(axes.get_window_extent())
        assert figure.bbox.count_contains(legend.corners()) == 4


def test_thread_count_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    with demo.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("arguments", [("--epochs", "0"), ("--batch-size", "1348"), ("--batch-size", "many")])
def test_impossible_arguments_are_refused(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(arguments)
    assert arguments[0] in capsys.readouterr().err
