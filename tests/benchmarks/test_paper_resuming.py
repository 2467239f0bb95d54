"""A run that was interrupted, wherever and however, ends with the very numbers of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")

from benchmarks.paper import checkpoint as checkpoint_module
from benchmarks.paper import cli
from benchmarks.paper.checkpoint import Checkpoint
from benchmarks.paper.data import DataError
from benchmarks.paper.effort import Effort
from benchmarks.paper.language_training import train_language
from benchmarks.paper.optimizers import OPTIMIZERS
from benchmarks.paper.run import Run
from benchmarks.paper.runner import Place, carry_out
from benchmarks.paper.store import Store
from benchmarks.paper.training import Trained, train_images

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
IMAGES = Run("noise", "small-resnet", "AdamS", 1e-3, 5e-3, epochs=3, batch_size=8, seed=3, milestones=(1, 2))
AUGMENTED = replace(IMAGES, augment=True, evaluate_every=2, milestones=(), cosine=(1, 2))
TEXT = Run("noise-text", "small-lstm", "AdamS", 1e-3, 5e-5, epochs=3, batch_size=4, seed=3)  # with dropout
STEPS = {"noise": 4, "noise-text": 2}  # an epoch's


pytestmark = pytest.mark.usefixtures("one_thread")


class Aborted(BaseException):
    pass


def trained(run: Run, checkpoint: Checkpoint | None = None) -> Trained:
    train = train_language if run.data == "noise-text" else train_images
    torch.manual_seed(12345)  # what was drawn in the process before must not matter
    return train(run, None, CPU, lambda: None, checkpoint)


def aborted_after(step: int, run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves after that step of the run, and dies."""
    original, count = Checkpoint.save, 0

    def save_and_die(self: Checkpoint, content: Any) -> None:
        nonlocal count
        count += 1
        if count == step:
            original(self, content)
            raise Aborted

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", save_and_die)
        with pytest.raises(Aborted):
            trained(run, Checkpoint(path, Effort(), save_every=0.0))


def numbers(result: Trained) -> str:
    return repr([asdict(epoch) for epoch in result.epochs])  # NaN equals NaN


@pytest.mark.parametrize("run", [IMAGES, AUGMENTED, TEXT], ids=["images", "augmented, cosine", "text"])
def test_resumed_anywhere_equals_uninterrupted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = numbers(trained(run))
    for step in range(1, run.epochs * STEPS[run.data] + 1):
        path = tmp_path / f"{step}.checkpoint"
        aborted_after(step, run, path, monkeypatch)
        assert numbers(trained(run, Checkpoint(path, Effort()))) == expected, step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(IMAGES, optimizer=optimizer, lr=OPTIMIZERS[optimizer].lr)
    aborted_after(6, run, tmp_path / "checkpoint", monkeypatch)
    assert numbers(trained(run, Checkpoint(tmp_path / "checkpoint", Effort()))) == numbers(trained(run))


def test_a_run_interrupted_twice_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted_after(3, AUGMENTED, tmp_path / "checkpoint", monkeypatch)
    aborted_after(4, AUGMENTED, tmp_path / "checkpoint", monkeypatch)  # the seventh in all
    content = torch.load(tmp_path / "checkpoint", weights_only=True)
    assert (len(content["epochs"]), content["means"]["count"]) == (1, 3)
    assert numbers(trained(AUGMENTED, Checkpoint(tmp_path / "checkpoint", Effort()))) == numbers(trained(AUGMENTED))


def test_time_and_warnings_go_on_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    aborted_after(3, IMAGES, path, monkeypatch)
    torch.save({**torch.load(path), "effort": {"seconds": 1000.0, "warnings": 2}}, path)
    effort = Effort()
    with effort.counted():
        trained(IMAGES, Checkpoint(path, effort))
    assert 1000 < effort.seconds < 1100
    assert effort.warnings == 2


def test_runs_under_way_are_saved_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(checkpoint_module.time, "monotonic", lambda: now)
    checkpoint = Checkpoint(tmp_path / "checkpoint", Effort())
    saved = []
    for now in (30.0, 59.0, 61.0, 90.0, 120.0, 122.0):
        if checkpoint.is_due():
            checkpoint.save({})
            saved.append(now)
    assert saved == [61.0, 122.0]


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.checkpoint"
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(DataError, match=r"broken\.checkpoint cannot be read .* Delete the file"):
        trained(IMAGES, Checkpoint(path, Effort()))


def test_a_finished_run_leaves_only_its_result(tmp_path: Path) -> None:
    place = Place(None, tmp_path, "cpu", workers=1, save_every=0.0)
    carry_out(IMAGES, place, lambda: None)
    assert list(tmp_path.iterdir()) == [Store(tmp_path).path(IMAGES)]


# --- Killed without a chance to say goodbye

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
KILLS_ITSELF = """
import os, signal, sys
from benchmarks.paper import cli
from benchmarks.paper.checkpoint import Checkpoint

save, saves = Checkpoint.save, 0

def save_and_be_killed(self, content):
    global saves
    save(self, content)
    saves += 1
    if saves == 7:
        os.kill(os.getpid(), signal.SIGKILL)

Checkpoint.save = save_and_be_killed
cli.main(sys.argv[1:])
"""


def arguments(task: str, workers: int, out: Path) -> list[str]:
    """A few runs of two or three epochs, saved after each step."""
    chosen = ["gradnorm", "--preset", "tiny", "--seeds", "1", "--task", task, "--device", "cpu"]
    return [*chosen, "--save-every", "0", "--workers", str(workers), "--out", str(out)]


def results(folder: Path) -> dict[str, str]:
    loaded = {path.name: Store(folder).content(path) for path in folder.glob("*.json")}
    return {name: repr(content["epochs"]) for name, content in loaded.items()}


def goes_on(task: str, workers: int, killed: Path) -> None:
    """To the results of a command that was not killed."""
    runs = killed / "runs"
    assert list(runs.glob("*.checkpoint"))
    cli.main(arguments(task, workers, killed))
    cli.main(arguments(task, 1, killed.with_name("whole")))
    assert results(runs) == results(killed.with_name("whole") / "runs")
    assert not list(runs.glob("*.checkpoint"))


def test_killed_by_sigkill_it_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLS_ITSELF, *arguments("noise/small-vgg", 1, tmp_path / "killed")]
    assert subprocess.run(command, cwd=ROOT, env=ENVIRONMENT).returncode == -signal.SIGKILL
    goes_on("noise/small-vgg", 1, tmp_path / "killed")


def test_killed_with_its_workers_it_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "benchmarks.paper", *arguments("noise/small-resnet", 2, out)]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True)
    while not list((out / "runs").glob("*.checkpoint")) and process.poll() is None:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    goes_on("noise/small-resnet", 2, out)
