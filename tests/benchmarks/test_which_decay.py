"""The comparison of kinds of decay: what contenders compute, fits, verdicts, resuming, and the command."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from benchmarks.conditions import read_rows
from benchmarks.studies.runner import Record
from benchmarks.studies.store import Store
from benchmarks.which_decay import cli
from benchmarks.which_decay.contenders import ADAMC, ADAMS, ADAMW, BY_NAME, CONTENDERS, NO_DECAY
from benchmarks.which_decay.exponents import SETTLED, exponent, stages
from benchmarks.which_decay.losses import findings
from benchmarks.which_decay.runs import LrSchedule, Run, stairs
from benchmarks.which_decay.tasks import CifarResNet, ProseGPT, ScaleFreeDigits

STORED = Path(__file__).parents[2] / "benchmarks/results/which_decay"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 800)
    return path


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        records = generator.integers(0, 256, (4, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
    return tmp_path


# --- Contenders


def test_only_layers_that_a_norm_follows_are_corrected(text: Path, cifar: Path) -> None:
    for task in (ProseGPT(text, quick=True), CifarResNet(cifar)):
        model = task.model()
        groups = task.groups(model)
        corrected = {name for name, _ in groups[0]["params"]}
        for name, expected in ((ADAMC, True), (ADAMW, False)):
            built = BY_NAME[name].build(groups, 1e-3, 0.1, task.betas, 1).param_groups
            assert [group["corrected_decay"] for group in built] == [expected, False, False][: len(built)]
        if isinstance(task, ProseGPT):
            assert corrected == {n for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2}
        else:
            assert corrected == {n for n, p in model.named_parameters() if p.dim() == 4}


def test_the_layers_of_nets_with_batch_norm_have_no_scale(cifar: Path) -> None:
    """What the predictions rest on."""
    for task in (ScaleFreeDigits(), CifarResNet(cifar)):
        torch.manual_seed(0)
        model = task.model()
        batch = task.batch(torch.Generator().manual_seed(0))
        before = task.loss(model, batch).item()
        with torch.no_grad():
            for param in task.groups(model)[0]["params"]:
                (param[1] if isinstance(param, tuple) else param).mul_(3.0)
        assert task.loss(model, batch).item() == pytest.approx(before, rel=1e-3)


# --- Learning rates


def test_stairs() -> None:
    schedule = stairs(0.8, (1, 2, 1), shortest=3, lengthening=2, power=2)
    assert schedule == LrSchedule((0.8, 0.4, 0.8), (3, 8, 3), warm_up=1)
    assert [schedule.at(step) for step in range(1, 15)] == [0.8] * 3 + [0.4] * 8 + [0.8] * 3
    assert Run("digits", "", ADAMW, 1.0, 0, schedule, 4).windows == [3, 1, 4, 3, 1, 2]  # windows end with stages


# --- Exponents

SCHEDULE = stairs(0.01, (1, 2, 4, 8), shortest=100, lengthening=0, power=1)


def made_up_run(contender: str, exponent: float, seed: int, unsettled: int | None = None) -> tuple[Run, Record]:
    """Norms that follow a power law once settled, with noise; in the first half of each stage they are elsewhere."""
    generator = np.random.default_rng(seed)
    points = []
    for step in range(10, SCHEDULE.steps + 1, 10):
        lr, stage = SCHEDULE.at(step), SCHEDULE.stage(step)
        settling = (step - 1) % 100 < 50
        norm = 99.0 if settling or stage == unsettled else lr**exponent * math.exp(0.01 * generator.normal())
        shrink = 0.01 if stage == unsettled else 0.4
        points.append(point(step, norm, 1 / norm, shrink))
    run = Run("digits", "made up", contender, 1.0, seed, SCHEDULE, 10)
    return run, {"points": points, "normed_parameters": 100}


def point(step: int, grad_norm: float, weight_norm: float, shrink: float) -> dict[str, float]:
    norms = {"normed_grad_norm": grad_norm, "squared_grad_norm": 1.0, "normed_weight_norm": weight_norm}
    return {"step": step, "steps": 10, "train_loss": 1.0, "summed_decay": shrink, **norms}


@pytest.mark.parametrize(("contender", "expected"), [(ADAMW, -0.5), (ADAMS, -1 / 3), (ADAMC, 0.0)])
def test_a_known_exponent_is_found_and_a_wrong_one_is_not(contender: str, expected: float) -> None:
    rows = [stage for seed in range(4) for stage in stages(*made_up_run(contender, expected, seed))]
    found = exponent(rows, "normed_grad_norm")
    assert BY_NAME[contender].exponent == expected
    assert found.mean == pytest.approx(expected, abs=0.02)
    assert exponent(rows, "normed_weight_norm").mean == pytest.approx(-expected, abs=0.02)
    unit = exponent(rows, "unit_grad_norm")
    assert unit.low < 0 < unit.high
    assert not any(found.low < wrong < found.high for wrong in {-0.5, -1 / 3, 0.0} - {expected})


def test_stages_that_have_not_settled_are_left_out() -> None:
    rows = list(stages(*made_up_run(ADAMW, -0.5, 0, unsettled=1)))
    assert [stage["settled"] for stage in rows] == [True, False, True, True]
    assert rows[1]["e_foldings"] == pytest.approx(2 * 5 * 0.01)
    assert rows[0]["e_foldings"] >= SETTLED
    assert exponent(rows, "normed_grad_norm").mean == pytest.approx(-0.5, abs=0.02)
    too_few = [{**stage, "settled": stage["stage"] < 2} for stage in rows]
    assert exponent(too_few, "normed_grad_norm") is None  # two points are no law
    plain, cautious = (next(stages(*made_up_run(name, -0.5, 0)))["e_foldings"] for name in (ADAMW, "cautious AdamW"))
    assert cautious == pytest.approx(plain / 2)  # half of it counts towards settling


def test_balance_is_one_for_a_random_walk() -> None:
    """Independent of training: weights that shrink and are moved by white noise as large as Adam's updates."""
    lr, shrink, count = 0.01, 0.02, 4000
    weights = torch.zeros(count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        weights = (1 - shrink) * weights - lr * torch.randn(count, generator=generator)
    points = [point(step, 1.0, float(weights.norm()), 10 * shrink) for step in (10, 20)]
    run = Run("digits", "", ADAMW, 1.0, 0, LrSchedule((lr,), (20,), 0), 10)
    (stage,) = stages(run, {"points": points, "normed_parameters": count})
    assert stage["balance"] == pytest.approx(1.0, rel=0.05)


# --- Losses


def made_up_rows(contender: str, losses: dict[tuple[float, int], float]) -> list[dict[str, Any]]:
    same = {"task": "gpt", "contender": contender}
    return [
        {**same, "decay": decay, "seed": seed, "validation_loss": loss, "test_loss": loss + 0.5}
        for (decay, seed), loss in losses.items()
    ]


def test_the_seed_that_chose_a_decay_does_not_judge_it() -> None:
    seeds = {(0.3, 1): 1.4, (0.3, 2): 1.7, (0.3, 3): 1.6}
    rows = made_up_rows(ADAMW, {(0.1, 0): 2.0, (0.3, 0): 1.5, (1.0, 0): 1.8, **seeds})
    shifts = (-0.1, -0.11, -0.1)
    shifted = {(1.0, seed): loss + shift for ((_, seed), loss), shift in zip(seeds.items(), shifts, strict=True)}
    # By how much seed 0 likes the decay that it has chosen is of no matter.
    rows += made_up_rows(ADAMS, {(0.1, 0): 3.0, (0.3, 0): 3.0, (1.0, 0): -99.0, **shifted})
    adamw, adams = findings(rows, "gpt")
    assert (adamw.contender, adamw.decay, adams.contender, adams.decay) == (ADAMW, 0.3, ADAMS, 1.0)
    assert adams.differences("validation_loss") == pytest.approx(list(shifts))
    assert adams.interval("test_loss").high < 0
    assert findings(rows[:4] + rows[6:10], "gpt")[1].interval("test_loss") is None  # too few seeds
    at_one = findings(rows, "gpt", at=1.0)  # fixed beforehand: seed 0 judges, too
    assert [(f.contender, f.decay, len(f.rows)) for f in at_one] == [(ADAMW, 1.0, 1), (ADAMS, 1.0, 4)]


# --- The command


def test_command_and_continuing_it(tmp_path: Path, text: Path, cifar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["--quick", "--text", str(text), "--data", str(cifar), "--out", str(out)]
    cli.main(arguments)
    losses = read_rows(out / "which_decay_losses.csv")
    for task in ("gpt", "resnet"):
        own = [row for row in losses if row["task"] == task]
        assert {(r["contender"], r["decay"]) for r in own if r["seed"] == "0"} == {(NO_DECAY, "0.0")} | {
            (c.name, decay) for c in CONTENDERS[1:] for decay in ("0.1", "1.0")
        }
        more = {(r["contender"], r["decay"]) for r in own if r["seed"] == "1"}
        assert {contender for contender, _ in more} == set(BY_NAME)
        if task == "resnet":
            assert {(c.name, "1.0") for c in CONTENDERS[1:]} <= more
        assert all(r["torch"] and r["cpu"] and r["date"] for r in own)
        assert len({r["validation_loss"] for r in own if r["seed"] == "0"}) > 3
    stage_rows = read_rows(out / "which_decay_exponents.csv")
    assert {stage["task"] for stage in stage_rows} == {"digits", "plain resnet"}
    assert len([stage for stage in stage_rows if stage["task"] == "digits"]) == 6 * 2 * 4
    assert (out / "which_decay.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert all(words in said for words in ("cautious AdamS", "predicted", "losses at the best", "at a decay of 1"))

    store = Store(out / "runs.jsonl")
    lines = store.path.read_text().splitlines(keepends=True)
    removed = next(line for line in lines if '"key": "gpt-AdamS-' in line)
    store.path.write_text("".join(line for line in lines if line != removed))
    cli.main(arguments)
    assert len(store.read()) == len(lines)
    again = read_rows(out / "which_decay_losses.csv")
    changing = {"date", "seconds", "other_load"}
    assert [{k: v for k, v in row.items() if k not in changing} for row in again] == [
        {k: v for k, v in row.items() if k not in changing} for row in losses
    ]


def test_the_stored_rows_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in STORED.glob("*.csv"):
        shutil.copy(path, tmp_path)
    cli.main(["plot", "--out", str(tmp_path)])
    assert (tmp_path / "which_decay.png").read_bytes().startswith(b"\x89PNG")
    assert "not settled" in capsys.readouterr().out
