"""The comparison of 8-bit moments in training: its peers are what they claim, and it says what it found."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import eight_bit_findings, eight_bit_training, plot_eight_bit_training
from benchmarks.eight_bit_contenders import (
    ADAMS,
    ADAMW,
    BLOCK,
    CONTENDERS,
    EIGHT_BIT,
    LEAST_NUMEL,
    Contender,
    PlainAdamS,
    at_random,
    at_random_by_square,
    dynamic_map,
    of_fused_adams,
    plain,
    through_codes_of_root,
    through_dynamic_map,
    through_signed_codes,
    to_nearest,
)
from swd_fused import FusedAdamS

ROOT = Path(__file__).parents[2]
WEIGHT_DECAY = 1e-3


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


# --- How moments are stored


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map(signed: bool) -> None:
    """The extreme values are the paper's: 7 decades, and more of them for what has no sign."""
    codes = dynamic_map(signed)
    assert len(codes.unique()) == 256
    assert codes.sort().values.equal(codes)
    assert 0 in codes
    assert codes[-1] == 1
    assert codes[-2] == pytest.approx(1 - 0.9 / (64 if signed else 128) / 2)
    assert codes[codes > 0][0] == pytest.approx(5.5e-7 if signed else 3.25e-7)


@pytest.mark.skipif(not find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_is_that_of_the_package(signed: bool) -> None:
    from bitsandbytes.functional import create_dynamic_map

    torch.testing.assert_close(dynamic_map(signed), create_dynamic_map(signed), rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_stores_the_nearest_value(signed: bool) -> None:
    given = values(3, 100) if signed else values(3, 100).square()
    stored = through_dynamic_map(given, signed).flatten()
    for begin in (0, BLOCK):
        block = given.flatten()[begin : begin + BLOCK]
        candidates = dynamic_map(signed) * block.abs().max()
        best = (block[:, None] - candidates).abs().amin(1)
        torch.testing.assert_close((stored[begin : begin + BLOCK] - block).abs(), best, rtol=1e-5, atol=1e-7)


def test_codes_are_within_one_of_what_they_store() -> None:
    given = values(5, 300)
    for block in (slice(0, BLOCK), slice(BLOCK, 300)):
        scales = given[:, block].abs().amax(1, keepdim=True) / 127
        for rounded, most in ((to_nearest, 0.5), (at_random, 1.0)):
            error = (through_signed_codes(given, rounded) - given)[:, block].abs()
            assert (error <= most * scales * (1 + 1e-4)).all()


def test_second_moments_do_not_vanish() -> None:
    for rounded in (to_nearest, at_random, at_random_by_square):
        assert (through_codes_of_root(values(16, BLOCK).square(), rounded) > 0).all()
        assert through_codes_of_root(torch.zeros(4, 8), rounded).eq(0).all()


def test_roundings_at_random_are_unbiased_in_codes_or_in_their_squares() -> None:
    torch.manual_seed(0)
    codes = torch.full((100_000,), 2.5)
    assert at_random(codes).mean() == pytest.approx(2.5, abs=0.01)
    assert at_random(codes).square().mean() == pytest.approx(6.5, abs=0.05)
    assert at_random_by_square(codes).square().mean() == pytest.approx(6.25, abs=0.05)


def identity(moment: Tensor) -> Tensor:
    return moment


def trained(build: Any, steps: int = 5) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((30, 300), (40,))]
    optimizer = build(params)
    for _ in range(steps):
        for param in params:
            param.grad = 1e-2 * torch.randn(param.shape, generator=generator)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in params]), optimizer


def test_plain_adams_is_adams() -> None:
    ours, plain_adams = trained(lambda params: PlainAdamS(params, WEIGHT_DECAY, identity, identity))
    fused, fused_adams = trained(lambda params: FusedAdamS(params, weight_decay=WEIGHT_DECAY))
    torch.testing.assert_close(ours, fused, rtol=1e-5, atol=1e-6)
    assert plain_adams.exp_avg_sq_mean == pytest.approx(float(fused_adams.exp_avg_sq_mean), rel=1e-5)
    assert plain_adams.effective_weight_decay() == pytest.approx(fused_adams.effective_weight_decay(), rel=1e-5)
    undecayed, _ = trained(lambda params: PlainAdamS(params, 0.0, identity, identity))
    assert (undecayed - fused).abs().max() > 1e-4


def test_stored_second_moments_of_fused_adams() -> None:
    """Codes of the root, in blocks within rows: 300 are a block of 256 and one of 44."""
    _, exact = trained(lambda params: FusedAdamS(params, weight_decay=WEIGHT_DECAY))
    _, coded = trained(lambda params: FusedAdamS(params, weight_decay=WEIGHT_DECAY, state_dtype="8bit"))
    for own, other in zip(coded.param_groups[0]["params"], exact.param_groups[0]["params"], strict=True):
        assert ("exp_avg_sq_root_codes" in coded.state[own]) == (own.numel() >= LEAST_NUMEL)
        roots, wanted = of_fused_adams(coded, own).sqrt(), plain(exact, other).sqrt()
        assert roots.shape == own.shape
        assert (roots - wanted).abs().max() < 8 / 255 * wanted.max()
        assert (roots - wanted).abs().mean() < 2 / 255 * wanted.max()


# --- What is watched


def watched(contender: Contender, steps: int) -> eight_bit_training.Watch:
    generator = torch.Generator().manual_seed(2)
    param = torch.nn.Parameter(torch.randn(10, generator=generator))
    optimizer = contender.build([param], (WEIGHT_DECAY, 0.1))
    watch = eight_bit_training.Watch(contender, optimizer, [param], 0.1)
    for _ in range(steps):
        param.grad = torch.randn(10, generator=generator)
        eight_bit_training.set_lr(optimizer, 1e-2)
        watch.step(1e-2)
    return watch


@pytest.mark.parametrize("name", [ADAMS, ADAMW])
def test_float32_deviates_by_nothing(name: str) -> None:
    (contender,) = (contender for contender in CONTENDERS if contender.name == name)
    watch = watched(contender, steps=1)
    assert watch.largest_update == pytest.approx(1, rel=1e-4)  # Adam's first step, whatever the gradient
    assert watched(contender, steps=4).deviations(4) == pytest.approx((0, 0), abs=1e-6)


def test_a_deviation_is_seen() -> None:
    (adamw,) = (contender for contender in CONTENDERS if contender.name == ADAMW)
    halved = Contender("halved", ADAMW, adamw.build, lambda optimizer, param: plain(optimizer, param) / 2)
    assert watched(halved, steps=3).deviations(3) == pytest.approx((-0.5, -0.5), abs=1e-6)


# --- What is said


def made_up(contender: str, losses: list[float]) -> list[dict[str, Any]]:
    numbers = {"held_out_accuracy": 0.5, "sum_of_v": -0.01, "mean_of_v_rms": 0.02, "largest_update": 3.0}
    own = {"task": "gpt", "contender": contender, "steps": 9, "parameters": 7}
    return [{**own, "seed": seed, "train_loss": x, "held_out_loss": x, **numbers} for seed, x in enumerate(losses)]


@pytest.mark.parametrize(
    ("shift", "no_worse", "said"),
    [(0.05, True, "within"), (-0.05, True, "within"), (-0.2, True, "lower"), (0.2, False, "HIGHER")],
)
def test_verdict_is_by_the_spread_of_the_reference(shift: float, no_worse: bool, said: str) -> None:
    losses = [1.0, 1.1, 1.2]
    rows = made_up(ADAMS, losses) + made_up(EIGHT_BIT, [loss + shift for loss in losses])
    reference, finding = eight_bit_findings.findings(rows)
    assert reference.difference == (0, 0)
    assert finding.spread == pytest.approx(0.1)
    assert finding.no_worse == no_worse
    verdict = eight_bit_findings.verdict(finding)
    assert f"training loss {shift:+.4f}, {said}" in verdict
    assert ("WORSE" in verdict) == (not no_worse)
    assert f"| {EIGHT_BIT} | {1.1 + shift:.4f} ± 0.1000 | {shift:+.4f} ± 0.0000 |" in eight_bit_findings.markdown(rows)


def test_one_seed_is_not_judged() -> None:
    _, finding = eight_bit_findings.findings(made_up(ADAMS, [1.0]) + made_up(EIGHT_BIT, [2.0]))
    assert "not judged" in eight_bit_findings.verdict(finding)


# --- The command


def test_command_and_continuing_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--quick",
        "--seeds",
        "2",
        "--every",
        "2",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
        "--contender",
        EIGHT_BIT,
    ]
    eight_bit_training.main([*arguments, "--task", "cnn"])
    rows = rows_of(tmp_path / "eight_bit_training.csv")
    assert [(row["contender"], row["seed"]) for row in rows] == [(n, s) for n in (ADAMS, EIGHT_BIT) for s in "01"]
    first = {row["seed"]: row for row in rows if row["contender"] == ADAMS}
    assert first["0"]["train_loss"] != first["1"]["train_loss"]
    for row in rows:
        assert float(row["train_loss"]) == pytest.approx(float(first[row["seed"]]["train_loss"]), rel=0.01)
    assert len(rows_of(tmp_path / "eight_bit_training_curves.csv")) == 4 * 3
    assert (tmp_path / "eight_bit_training.png").read_bytes().startswith(b"\x89PNG")
    assert f"cnn: {EIGHT_BIT} is" in capsys.readouterr().out

    eight_bit_training.main([*arguments, "--keep", "--task", "gpt"])
    both = rows_of(tmp_path / "eight_bit_training.csv")
    assert [row for row in both if row["task"] == "cnn"] == rows
    assert [row["task"] for row in both] == 4 * ["cnn"] + 4 * ["gpt"]


@pytest.mark.parametrize("module", [eight_bit_training, plot_eight_bit_training])
def test_help(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        module.main(["--help"])
    assert exit_info.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_unknown_contender_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        eight_bit_training.main(["--contender", "no such thing"])
    assert "No contender" in capsys.readouterr().err
