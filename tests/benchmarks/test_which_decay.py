"""The comparison of kinds of decay: what contenders compute, fits, verdicts, resuming, and the command."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.which_decay import cli, findings, plot
from benchmarks.which_decay.contenders import ADAMC, ADAMS, ADAMW, CONTENDERS, NAMES, NO_DECAY, by_name
from benchmarks.which_decay.exponents import SETTLED, Interval, exponents, slope, stage_of, stages
from benchmarks.which_decay.findings import Finding
from benchmarks.which_decay.lr_schedules import Cosine, Staircase, stairs
from benchmarks.which_decay.parts import QUICK
from benchmarks.which_decay.run import Checkpoint, Point, Run, Store, Trained
from benchmarks.which_decay.tasks import CifarResNet, ProseGPT, ScaleFreeDigits
from benchmarks.which_decay.training import train

pytest.importorskip("sklearn")


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


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- Contenders

LRS = (0.01, 0.02, 0.01, 0.004)
DECAY, B1, B2 = 0.5, 0.9, 0.99


def weights_by_hand(name: str, start: np.ndarray, grads: list[np.ndarray], elsewhere: list[np.ndarray]) -> np.ndarray:
    """Adam, with the decay of each kind as its paper writes it, in float64. Calibrated in the first step."""
    weights = start.copy()
    moments = [np.zeros_like(start), np.zeros_like(start), np.zeros_like(elsewhere[0])]
    rms_at_first = math.nan
    for step, (lr, grad, other) in enumerate(zip(LRS, grads, elsewhere, strict=True), 1):
        moments[0] = B1 * moments[0] + (1 - B1) * grad
        moments[1] = B2 * moments[1] + (1 - B2) * grad**2
        moments[2] = B2 * moments[2] + (1 - B2) * other**2
        v_hat, other_hat = (v / (1 - B2**step) for v in moments[1:])
        rms = math.sqrt(np.concatenate([v_hat.ravel(), other_hat.ravel()]).mean())
        rms_at_first = rms if step == 1 else rms_at_first
        update = moments[0] / (1 - B1**step) / (np.sqrt(v_hat) + 1e-8)
        share = lr * DECAY
        if "AdamS" in name:
            share *= rms_at_first / rms
        if name in (ADAMC, "corrected AdamS"):
            share *= lr / max(LRS[:step])
        decays = np.ones_like(weights)
        if "cautious" in name:
            decays = (update * weights >= 0).astype(float)
        if name == NO_DECAY:
            share = 0.0
        weights = weights - share * decays * weights - lr * update
    return weights


@pytest.mark.parametrize("name", NAMES)
def test_each_contender_decays_as_its_name_says(name: str) -> None:
    generator = np.random.default_rng(1)
    start = generator.normal(size=(3, 4))
    grads = [generator.normal(size=(3, 4)) * scale for scale in (1.0, 0.1, 0.05, 0.5)]
    elsewhere = [generator.normal(size=2) * scale for scale in (2.0, 0.1, 0.05, 0.5)]
    weight, bias = (nn.Parameter(torch.tensor(values)) for values in (start, np.zeros(2)))
    groups = [
        {"params": [weight], "weight_decay": 1.0, "corrected_decay": True},
        {"params": [bias], "weight_decay": 0.0},
    ]
    optimizer = by_name(name).build(groups, LRS[0], 0.0 if name == NO_DECAY else DECAY, (B1, B2), calibration_steps=1)
    for lr, grad, other in zip(LRS, grads, elsewhere, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        weight.grad, bias.grad = torch.tensor(grad), torch.tensor(other)
        optimizer.step()
    by_hand = {other: weights_by_hand(other, start, grads, elsewhere) for other in NAMES}
    np.testing.assert_allclose(weight.detach().numpy(), by_hand[name], rtol=1e-6)
    for other in set(NAMES) - {name}:
        assert np.abs(weight.detach().numpy() - by_hand[other]).max() > 1e-4, f"cannot tell {name} from {other}"


def test_only_layers_that_a_norm_follows_are_corrected(text: Path, cifar: Path) -> None:
    for task in (ProseGPT(text, quick=True), CifarResNet(cifar)):
        model = task.model()
        groups = task.groups(model)
        corrected = {name for name, _ in groups[0]["params"]}
        assert by_name(ADAMC).build(groups, 1e-3, 0.1, task.betas, 1).param_groups[0]["corrected_decay"]
        assert not any(
            group["corrected_decay"] for group in by_name(ADAMW).build(groups, 1e-3, 0.1, task.betas, 1).param_groups
        )
        if isinstance(task, ProseGPT):
            assert corrected == {n for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2}
        else:
            assert corrected == {n for n, p in model.named_parameters() if p.dim() == 4}


def test_the_layers_of_nets_with_batch_norm_have_no_scale(cifar: Path) -> None:
    """What the predictions rest on."""
    for task in (ScaleFreeDigits(), CifarResNet(cifar)):
        torch.manual_seed(0)
        model = task.model()
        before = task.loss(model, torch.Generator().manual_seed(0)).item()
        with torch.no_grad():
            for param in task.groups(model)[0]["params"]:
                (param[1] if isinstance(param, tuple) else param).mul_(3.0)
        assert task.loss(model, torch.Generator().manual_seed(0)).item() == pytest.approx(before, rel=1e-3)


# --- Learning rates


def test_cosine_warms_up_and_falls_to_zero() -> None:
    schedule = Cosine(1.0, 100, 10)
    lrs = [schedule.at(step) for step in range(1, 101)]
    assert lrs[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert lrs[9:] == sorted(lrs[9:], reverse=True)
    assert 0 < lrs[-1] < 1e-3
    assert lrs[10 + 45] == pytest.approx(0.5, abs=0.02)


def test_stairs() -> None:
    schedule = stairs(0.8, (1, 2, 1), shortest=3, lengthening=2, power=2)
    assert schedule == Staircase((0.8, 0.4, 0.8), (3, 8, 3))
    assert [schedule.at(step) for step in range(1, 15)] == [0.8] * 3 + [0.4] * 8 + [0.8] * 3
    assert [step for step in range(1, 15) if schedule.ends_stage(step)] == [3, 11, 14]


# --- Exponents

SCHEDULE = stairs(0.01, (1, 2, 4, 8), shortest=100, lengthening=0, power=1)


def made_up_run(contender: str, exponent: float, seed: int, unsettled: int | None = None) -> tuple[Run, Trained]:
    """Norms that follow a power law once settled, with noise; in the first half of each stage they are elsewhere."""
    generator = np.random.default_rng(seed)
    points = []
    for step in range(10, SCHEDULE.steps + 1, 10):
        lr, stage = SCHEDULE.at(step), SCHEDULE.stage(step)
        settling = (step - 1) % 100 < 50
        norm = 99.0 if settling or stage == unsettled else lr**exponent * math.exp(0.01 * generator.normal())
        shrink = 0.01 if stage == unsettled else 0.4
        points.append(Point(step, 10, lr, 1.0, 2 * norm, norm, 3.0, 1 / norm, shrink))
    run = Run("digits", "made up", contender, 1.0, seed, SCHEDULE, 10)
    return run, Trained(points, 100, 100, 1.0, 1.0, 1.0, [])


@pytest.mark.parametrize(("contender", "exponent"), [(ADAMW, -0.5), (ADAMS, -1 / 3), (ADAMC, 0.0)])
def test_a_known_exponent_is_found_and_a_wrong_one_is_not(contender: str, exponent: float) -> None:
    measured = [stage for seed in range(4) for stage in stages(*made_up_run(contender, exponent, seed))]
    found = {e.quantity: e for e in exponents(measured)}
    gradient = found["normed_grad_norm"]
    assert gradient.predicted == pytest.approx(exponent)
    assert gradient.interval.mean == pytest.approx(exponent, abs=0.02)
    assert (gradient.seeds, gradient.lrs, gradient.left_out) == (4, 4, 0)
    assert found["normed_weight_norm"].interval.mean == pytest.approx(-exponent, abs=0.02)
    assert found["unit_grad_norm"].interval.contains(0.0)
    for wrong in {-0.5, -1 / 3, 0.0} - {exponent}:
        assert not gradient.interval.contains(wrong)
        other = [stage for seed in range(4) for stage in stages(*made_up_run(contender, wrong, seed))]
        assert not next(e for e in exponents(other) if e.quantity == "normed_grad_norm").interval.contains(exponent)


def test_stages_that_have_not_settled_are_left_out() -> None:
    measured = stages(*made_up_run(ADAMW, -0.5, 0, unsettled=1))
    assert [stage.settled for stage in measured] == [True, False, True, True]
    assert measured[1].e_foldings == pytest.approx(2 * 5 * 0.01)
    assert measured[0].e_foldings >= SETTLED
    gradient = exponents(measured)[0]
    assert (gradient.left_out, gradient.lrs) == (1, 3)
    assert gradient.interval.mean == pytest.approx(-0.5, abs=0.02)
    assert exponents(replace(stage, settled=stage.stage < 2) for stage in measured) == []  # two points are no law


def test_half_of_cautious_decay_counts_towards_settling() -> None:
    plain, cautious = (stages(*made_up_run(name, -0.5, 0))[0].e_foldings for name in (ADAMW, "cautious AdamW"))
    assert cautious == pytest.approx(plain / 2)


def test_balance_is_one_for_a_random_walk() -> None:
    """Independent of training: weights that shrink and are moved by white noise as large as Adam's updates."""
    lr, shrink, count = 0.01, 0.02, 4000
    weights = torch.zeros(count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        weights = (1 - shrink) * weights - lr * torch.randn(count, generator=generator)
    schedule = Staircase((lr,), (20,))
    points = [Point(step, 10, lr, 1.0, 1.0, 1.0, 1.0, float(weights.norm()), 10 * shrink) for step in (10, 20)]
    (stage,) = stages(Run("digits", "", ADAMW, 1.0, 0, schedule, 10), Trained(points, count, count, 1.0, 1.0, 1.0, []))
    assert stage.balance == pytest.approx(1.0, rel=0.05)


def test_slope_and_interval() -> None:
    assert slope([1.0, 2.0, 4.0], [3.0, 6.0, 12.0]) == pytest.approx(1.0)
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert Interval.of([1.0, 2.0, 3.0], comparisons=6).half_width == pytest.approx(10.886 / math.sqrt(3), rel=1e-3)
    assert math.isnan(Interval.of([1.0]).half_width)


# --- Verdicts


def made_up_rows(contender: str, losses: dict[tuple[float, int], float]) -> list[dict[str, Any]]:
    same = {"task": "gpt", "contender": contender, "shrink": 1.0, "normed_grad_norm": 1.0, "growth": 1.0}
    return [
        {
            **same,
            "decay": decay,
            "seed": seed,
            "validation_loss": loss,
            "test_loss": loss + 0.5,
            "normed_weight_norm": 1.0,
        }
        for (decay, seed), loss in losses.items()
    ]


@pytest.mark.parametrize(
    ("shifts", "said"), [((-0.1, -0.11, -0.1), "lower"), ((-0.1, 0.02, 0.1), "no"), ((0.1, 0.11, 0.11), "higher")]
)
def test_only_what_all_seeds_carry_is_called_lower_or_higher(shifts: tuple[float, ...], said: str) -> None:
    base = {(0.1, 0): 2.0, (0.3, 0): 1.5, (1.0, 0): 1.8, (0.3, 1): 1.4, (0.3, 2): 1.7}
    other = {
        (0.1, 0): 3.0,
        (0.3, 0): 3.0,
        (1.0, 0): 1.5 + shifts[0],
        (1.0, 1): 1.4 + shifts[1],
        (1.0, 2): 1.7 + shifts[2],
    }
    found: dict[str, Finding] = {
        f.contender: f for f in findings.findings(made_up_rows(ADAMW, base) + made_up_rows(ADAMS, other))
    }
    assert (found[ADAMW].decay, found[ADAMW].at_edge, found[ADAMW].verdict) == (0.3, "", "")
    assert (found[ADAMS].decay, found[ADAMS].at_edge, found[ADAMS].verdict) == (1.0, "highest", said)
    assert found[ADAMS].validation_difference.mean == pytest.approx(sum(shifts) / 3)
    at_one = findings.findings(made_up_rows(ADAMW, base) + made_up_rows(ADAMS, other), at=1.0)
    assert [(f.contender, f.decay, f.verdict) for f in at_one] == [(ADAMW, 1.0, ""), (ADAMS, 1.0, "one seed")]
    assert not any(f.at_edge for f in at_one)


def test_validation_and_test_must_agree() -> None:
    seeds = {(0.1, 0): 2.0, (0.1, 1): 2.1, (0.1, 2): 2.2}
    lower = made_up_rows(ADAMS, {key: loss - 0.1 for key, loss in seeds.items()})
    assert findings.findings(made_up_rows(ADAMW, seeds) + lower)[1].verdict == "lower"
    for row, shift in zip(lower, (-0.1, 0.1, 0.1), strict=True):
        row["test_loss"] += shift
    assert findings.findings(made_up_rows(ADAMW, seeds) + lower)[1].verdict == "no"


def test_one_seed_is_not_judged() -> None:
    rows = made_up_rows(ADAMW, {(0.1, 0): 2.0}) + made_up_rows(ADAMS, {(0.1, 0): 1.0})
    assert findings.findings(rows)[1].verdict == "one seed"


# --- Resuming


class InterruptedRunError(Exception):
    pass


def without_time(trained: Trained) -> Trained:
    return replace(trained, seconds=0.0)


@pytest.mark.parametrize("contender", [ADAMS, ADAMC, "cautious AdamS"])
@pytest.mark.parametrize("after", [20, 100])  # in the middle of calibration, and after it
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path: Path, contender: str, after: int) -> None:
    task = ScaleFreeDigits()
    run = Run("digits", task.data, contender, 5.0, 0, stairs(0.01, (1, 2), 80, 0, 1), 10)
    told: list[int] = []

    def interrupt(steps: int) -> None:
        told.append(steps)
        if sum(told) > after:
            raise InterruptedRunError

    checkpoint = Checkpoint(tmp_path / "run.pt", save_every=0.0)
    with pytest.raises(InterruptedRunError):
        train(run, task, checkpoint, interrupt)
    assert checkpoint.load()["step"] == after  # type: ignore[index]
    told.clear()
    resumed = train(run, task, checkpoint, told.append)
    assert told[0] == after
    assert sum(told) == run.schedule.steps
    whole = train(run, task, Checkpoint(tmp_path / "none.pt"), lambda steps: None)
    assert without_time(resumed) == without_time(whole)


# --- The command


def test_command_and_continuing_it(tmp_path: Path, text: Path, cifar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["--quick", "--text", str(text), "--data", str(cifar), "--out", str(out)]
    cli.main(arguments)
    losses = rows_of(out / "which_decay_losses.csv")
    for task in ("gpt", "resnet"):
        own = [row for row in losses if row["task"] == task]
        assert {(r["contender"], r["decay"]) for r in own if r["seed"] == "0"} == {(NO_DECAY, "0.0")} | {
            (c.name, decay) for c in CONTENDERS[1:] for decay in ("0.1", "1.0")
        }
        more = {(r["contender"], r["decay"]) for r in own if r["seed"] == "1"}
        assert {contender for contender, _ in more} == set(NAMES)
        if task == "resnet":
            assert {(c.name, "1.0") for c in CONTENDERS[1:]} <= more
        assert all(r["torch"] and r["cpu"] and r["date"] for r in own)
        assert len({r["validation_loss"] for r in own if r["seed"] == "0"}) > 3
    stage_rows = [stage_of(row) for row in rows_of(out / "which_decay_exponents.csv")]
    assert {stage.task for stage in stage_rows} == {"digits", "plain resnet"}
    assert len([stage for stage in stage_rows if stage.task == "digits"]) == 6 * 2 * 4
    assert rows_of(out / "which_decay_curves.csv")
    for picture in ("which_decay.png", "which_decay_norms.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert all(
        words in said for words in ("cautious AdamS", "predicted", "losses at the best decay", "at a decay of 1")
    )

    files = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    removed = next(path for path in files if path.name.startswith("gpt-AdamS-"))
    removed.unlink()
    cli.main(arguments)
    assert {path for path in (out / "runs").iterdir() if path.stat().st_mtime_ns != files[path]} == {removed}
    again = rows_of(out / "which_decay_losses.csv")
    changing = {"date", "seconds", "other_load"}
    assert [{k: v for k, v in row.items() if k not in changing} for row in again] == [
        {k: v for k, v in row.items() if k not in changing} for row in losses
    ]


def test_other_texts_are_other_runs(text: Path) -> None:
    part = next(part for part in QUICK if part.name == "gpt")
    first = part.runs(ProseGPT(text, quick=True).data)
    text.write_text(text.read_text() + "More.")
    assert not {run.key for run in first} & {run.key for run in part.runs(ProseGPT(text, quick=True).data)}


def test_missing_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="CIFAR-10"):
        cli.main(["--quick", "--part", "resnet", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="apt-get install anarchism"):
        cli.main(["--quick", "--part", "gpt", "--text", str(tmp_path / "none.txt"), "--out", str(tmp_path)])
    cli.main(["--draw", "--text", str(tmp_path / "none.txt"), "--out", str(tmp_path)])
    assert "Without resnet: " in capsys.readouterr().out
    assert Store(tmp_path / "runs").folder.exists() is False


@pytest.mark.parametrize("main", [cli.main, plot.main])
def test_help(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    assert "usage: python -m benchmarks.which_decay" in capsys.readouterr().out
