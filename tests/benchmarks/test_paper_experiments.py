"""Each experiment of the paper runs to its end, resumes, and draws from what it has written."""

from __future__ import annotations

import csv
import io
import math
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")

from benchmarks.paper import cli, runner, sharpness_training
from benchmarks.paper.data import DataError
from benchmarks.paper.epoch import Epoch
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.figures import DRAWINGS
from benchmarks.paper.figures.rows import over_seeds, read_rows
from benchmarks.paper.presets import PAPER, QUICK, TINY, Preset
from benchmarks.paper.run import Run
from benchmarks.paper.runner import Place
from benchmarks.paper.store import Store, conditions
from benchmarks.paper.summary import spread, summary
from benchmarks.paper.training import Trained

PNG = b"\x89PNG"
STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "paper"
STORED_CSVS = [*STORED.glob("*.csv"), *(STORED / "real").glob("*.csv")]
CONDITIONS = (
    "seconds",
    "warnings",
    "threads",
    "device",
    "cpu",
    "torch",
    "swd_fused",
    "pytorch_optimizer",
    "python",
    "date",
)


pytestmark = pytest.mark.usefixtures("one_thread")


def command(*arguments: str | Path) -> None:
    cli.main([*map(str, arguments), "--device", "cpu"])


def nothing_is_missing(runs: Sequence[Run], root: Path | None) -> None:
    pass


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- From the command to the picture


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_to_its_end(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(name, "--preset", "tiny", "--seeds", "1", "--workers", "1", "--out", tmp_path)
    rows = csv_rows(tmp_path / f"{name}.csv")
    runs = EXPERIMENTS[name].runs(TINY)
    one_seed = [run for run in runs if run.seed == 0]
    per_run = {"epochs": None, "last epoch": 1, "eigenvalues": 3}[EXPERIMENTS[name].rows]
    known = [row for row in rows if row.get("role", "tuning") == "tuning"]
    assert len(known) >= sum(per_run or run.epochs for run in one_seed)
    assert len(known) == len(rows) == sum(per_run or run.epochs for run in one_seed) or EXPERIMENTS[name].search(TINY)
    assert {row["optimizer"] for row in rows} == {run.optimizer for run in runs}
    for row in rows:
        assert all(row[condition] for condition in CONDITIONS if condition != "warnings")
        assert math.isfinite(float(row["train_loss"]))
        assert math.isfinite(float(row["squared_grad_norm"]))
    assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert f"{len(one_seed)} of {len(one_seed)} runs" in printed
    assert str(tmp_path / f"{name}.csv") in printed


def test_every_experiment_has_a_drawing() -> None:
    assert set(DRAWINGS) == set(EXPERIMENTS)


@pytest.mark.parametrize("stored", [path for path in STORED_CSVS if path.stem in EXPERIMENTS], ids=str)
def test_figure_is_drawn_from_the_stored_csv(stored: Path, tmp_path: Path) -> None:
    name = stored.stem
    shutil.copy(stored, tmp_path)
    before = (tmp_path / f"{name}.csv").read_bytes()
    command(name, "--draw", "--out", tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    assert (tmp_path / f"{name}.csv").read_bytes() == before


# --- Resuming


def test_an_interrupted_command_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    carried_out: list[Run] = []
    original = runner.train_language

    def interrupted_at_the_fourth(run: Run, *rest: object) -> Trained:
        carried_out.append(run)
        if len(carried_out) == 4:
            raise KeyboardInterrupt
        return original(run, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "train_language", interrupted_at_the_fourth)
    arguments = ("lstm", "--preset", "tiny", "--workers", "1", "--out", tmp_path)
    with pytest.raises(SystemExit, match="Runs are kept"):
        command(*arguments)
    assert len(list((tmp_path / "runs").glob("*.json"))) == 3
    assert not (tmp_path / "lstm.csv").exists()
    kept = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}

    command(*arguments)
    runs = EXPERIMENTS["lstm"].runs(TINY)
    assert Counter(carried_out) == Counter([*runs, carried_out[3]])
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert len(csv_rows(tmp_path / "lstm.csv")) == len(runs)

    command(*arguments)
    assert len(carried_out) == len(runs) + 1
    assert f"{len(runs)} of {len(runs)} runs" in capsys.readouterr().out


def test_a_trained_net_outlives_a_failure_in_its_eigenvalues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*arguments: object) -> None:
        raise MemoryError

    def trained_again(*arguments: object) -> None:
        raise AssertionError("the net was there")

    run = TINY.sharpness.run("AdamS", 5e-4, 0)
    without, place = (Place(None, tmp_path / name, "cpu", workers=1) for name in ("without", "with"))
    runner.carry_out(run, without, lambda: None)
    expected = Store(without.store).load(run)
    with monkeypatch.context() as patch:
        patch.setattr(sharpness_training, "top_eigenvalues", too_large)
        with pytest.raises(MemoryError):
            runner.carry_out(run, place, lambda: None)
    store = Store(place.store)
    assert store.find(run) is store.find(run.training) is None
    [net] = place.store.iterdir()
    torch.save({**torch.load(net), "effort": {"seconds": 1000.0, "warnings": 2}}, net)

    told: list[None] = []
    monkeypatch.setattr(sharpness_training, "train_model", trained_again)
    runner.carry_out(run, place, lambda: told.append(None))
    result = store.load(run)
    assert (result["epochs"], result["eigenvalues"]) == (expected["epochs"], expected["eigenvalues"])
    assert result["conditions"]["seconds"] > 1000
    assert result["conditions"]["warnings"] == 2
    assert len(told) == run.epochs
    assert list(place.store.iterdir()) == [store.path(run)]


def test_two_processes_give_the_same_as_one(tmp_path: Path) -> None:
    for workers in ("1", "2"):
        command("lstm", "--preset", "tiny", "--seeds", "1", "--workers", workers, "--out", tmp_path / workers)
    one, two = (csv_rows(tmp_path / workers / "lstm.csv") for workers in ("1", "2"))
    varying = ("seconds", "date")
    assert [{k: v for k, v in row.items() if k not in varying} for row in one] == [
        {k: v for k, v in row.items() if k not in varying} for row in two
    ]


def test_a_failing_run_in_another_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_needs", nothing_is_missing)
    place = Place(tmp_path, tmp_path / "runs", "cpu", workers=2)
    run = PAPER.tables[0].run("AdamS", 5e-4, 0)
    with pytest.raises(DataError, match="CIFAR-10"):
        runner.run_all([run], place, Console(quiet=True))


@pytest.mark.parametrize("preset", [QUICK, PAPER], ids=["quick", "paper"])
def test_experiments_share_their_runs(preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out: list[Run] = []
    monkeypatch.setattr(runner, "carry_out", lambda run, place, after_epoch: carried_out.append(run))
    monkeypatch.setattr(runner, "check_needs", nothing_is_missing)
    runs = [run for experiment in EXPERIMENTS.values() for run in experiment.runs(preset)]
    runner.run_all(runs, Place(None, tmp_path, "cpu", workers=1), Console(quiet=True))
    trained = [run.training for run in carried_out]
    assert Counter(trained) == Counter({run.training: 1 for run in runs})
    assert {run for run in runs if run.eigenvalues} <= set(carried_out)
    assert len(carried_out) < len(runs)


def test_a_run_with_eigenvalues_serves_for_the_same_one_without(tmp_path: Path) -> None:
    store, plain, richer = Store(tmp_path), TINY.basin.run("Adam", 0.5, 0), TINY.sharpness.run("Adam", 0.5, 0)
    assert richer.training == plain
    store.save(richer, Trained([], [3.0]), {})
    assert store.load(plain)["eigenvalues"] == [3.0]
    assert store.find(TINY.sharpness.run("Adam", 0.5, 1)) is None
    assert store.find(TINY.basin.run("Adam", 0.5, 1)) is None
    other = Store(tmp_path / "other")
    other.save(plain, Trained([], []), {})
    assert other.find(richer) is None


def test_a_half_written_result_is_not_taken_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, run = Store(tmp_path), TINY.gradnorm.run("Adam", 0.0, 0)
    epochs = [Epoch(1, 1e-3, 1.0, 1.0, 1.0, math.nan, 1.0)]

    def no_space(*paths: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", no_space)
        with pytest.raises(OSError, match="no space"):
            store.save(run, Trained(epochs, []), {})
    assert store.find(run) is None
    store.save(run, Trained(epochs, []), conditions(torch.device("cpu"), 1.0, 0))
    assert store.load(run)["run"]["optimizer"] == "Adam"


def test_runs_that_differ_in_anything_have_different_names() -> None:
    run = TINY.gradnorm.run("Adam", 0.0, 0)
    changes = {
        **asdict(PAPER.sharpness.run("AdamS", 0.5, 7, lr=3.0)),
        "cosine": (1, 2),
        "limit": 7,
        "held_out": 3,
        "part": "validation",
        "evaluate_every": 5,
    }
    del changes["hessian_images"]  # of no matter without eigenvalues
    others = [Run(**{**asdict(run), name: value}) for name, value in changes.items()]
    assert len({other.key for other in [run, *others]}) == len(others) + 1


# --- Figures and tables


def test_seeds_are_reduced_to_mean_and_range() -> None:
    rows = [{"x": x, "y": y} for x, y in ((2, 1.0), (1, 4.0), (2, 3.0), (1, math.nan))]
    xs, mean, least, most = over_seeds(rows, "x", "y")
    assert (xs.tolist(), mean.tolist(), least.tolist(), most.tolist()) == ([1, 2], [4, 2], [4, 1], [4, 3])


def test_summary_bears_a_run_that_diverged() -> None:
    assert spread([1.0, math.nan], "train_loss") == "nan ± nan"


def test_summary_has_the_end_of_each_run() -> None:
    base = {"data": "d", "model": "m", "lr": 0.1, "weight_decay": 0.5, "epochs": 2, "test_loss": 1.0}
    rows = [
        {
            **base,
            "optimizer": name,
            "seed": seed,
            "epoch": epoch,
            "test_error": error,
            "train_loss": 1.0,
            "squared_grad_norm": 2.0,
        }
        for name, seed, epoch, error in (("A", 0, 1, 0.9), ("A", 0, 2, 0.1), ("A", 1, 2, 0.3), ("B", 0, 2, 0.25))
    ]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(summary(rows, "title"))
    text = console.export_text()
    assert "20.00 ± 14.14" in text
    assert "25.00" in text
    assert "90" not in text


# --- Mistakes


def test_an_experiment_that_a_preset_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("basin", "--preset", "real")
    assert (
        "--preset real has no basin, wanted one of tuned, tuned-unaugmented, tuned-lstm, gradnorm"
        in capsys.readouterr().err
    )


def test_all_of_a_preset_is_drawn_without_what_it_lacks(tmp_path: Path) -> None:
    for path in STORED.glob("*.csv"):
        shutil.copy(path, tmp_path)
    command("all", "--draw", "--out", tmp_path)
    assert not (tmp_path / "tuned.png").exists()
    assert (tmp_path / "coupling.png").exists()


def test_help_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*EXPERIMENTS, "--preset", "--data", "--out", "--seeds", "all"))


def test_missing_data_end_the_command_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"CIFAR-10.*--data DIR"):
        command("table1", "--preset", "paper", "--task", "cifar10/resnet18", "--workers", "1", "--out", tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_missing_data_are_noticed_before_anything_is_trained(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*arguments: object) -> None:
        raise AssertionError("trained before it was known that all data are there")

    monkeypatch.setattr(runner, "carry_out", trained)
    monkeypatch.setattr(runner, "_in_processes", trained)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    place, first = Place(tmp_path, tmp_path / "runs", "cpu", workers), TINY.gradnorm.run("Adam", 0.0, 0)
    missing = {
        "CIFAR-100": PAPER.schedule[1],
        "Penn TreeBank": PAPER.language,
        "resnet50 is torchvision's": PAPER.large[0],
        "ImageNet": replace(PAPER.large[0], model="resnet18"),
    }
    for message, task in missing.items():
        with pytest.raises(DataError, match=message):
            runner.run_all([first, task.run("AdamS", 5e-4, 0)], place, Console(quiet=True))


def test_what_only_finished_runs_need_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = PAPER.schedule[1].run("AdamS", 5e-4, 0)
    Store(tmp_path).save(finished, Trained([], []), {})
    carried_out: list[Run] = []
    monkeypatch.setattr(runner, "carry_out", lambda run, place, after_epoch: carried_out.append(run))
    first = TINY.gradnorm.run("Adam", 0.0, 0)
    runner.run_all([finished, first], Place(None, tmp_path, "cpu", workers=1), Console(quiet=True))
    assert carried_out == [first]


def test_a_short_text_ends_the_command_with_a_message(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / f"ptb.{part}.txt").write_text("a b c \n")
    with pytest.raises(SystemExit, match="training part of penn-treebank has 4 words, too short"):
        command("lstm", "--preset", "paper", "--data", tmp_path, "--workers", "1", "--out", tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda" if not torch.cuda.is_available() else "cuda:99"])
def test_a_device_that_is_not_there_is_an_argument_error(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["lstm", "--preset", "tiny", "--out", str(tmp_path), "--device", device])
    assert exit_info.value.code == 2
    assert f"--device {device} cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("table9",), ("table1", "--seeds", "0"), ("table1", "--task", "mnist/lenet"), ("lstm", "--preset", "slow")],
)
def test_impossible_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2


def test_drawing_without_a_csv_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Run it first"):
        command("basin", "--draw", "--out", tmp_path)


def test_numbers_and_texts_of_a_csv_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("optimizer,epoch,lr,milestones,test_error\nAdam,3,1e-3,10 20,nan\n")
    [row] = read_rows(path)
    assert (row["optimizer"], row["epoch"], row["lr"], row["milestones"]) == ("Adam", 3, 1e-3, "10 20")
    assert math.isnan(row["test_error"])
