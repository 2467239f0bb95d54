"""The comparison of 8-bit moments in training: what it reads of stored moments, and what it says it found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn")

from benchmarks import eight_bit_findings, eight_bit_training
from benchmarks.eight_bit_training import (
    ADAMS,
    ADAMW,
    CONTENDERS,
    EIGHT_BIT,
    LEAST_NUMEL,
    REFERENCES,
    Contender,
    Watched,
    exp_avg_sq,
    of_fused_adams,
)
from benchmarks.studies.rows import read_rows
from swd_fused import FusedAdamS


def stepped(**options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((30, 300), (40,))]
    optimizer = FusedAdamS(params, weight_decay=1e-3, **options)
    for _ in range(5):
        for param in params:
            param.grad = 1e-2 * torch.randn(param.shape, generator=generator)
        optimizer.step()
    return optimizer


def test_stored_second_moments_of_fused_adams() -> None:
    """Codes of the root, in blocks within rows: 300 are a block of 256 and one of 44."""
    exact, coded = stepped(), stepped(state_dtype="8bit")
    for own, other in zip(coded.param_groups[0]["params"], exact.param_groups[0]["params"], strict=True):
        assert ("exp_avg_sq_root_codes" in coded.state[own]) == (own.numel() >= LEAST_NUMEL)
        roots, wanted = of_fused_adams(coded, own).sqrt(), exp_avg_sq(exact, other).sqrt()
        assert roots.shape == own.shape
        assert (roots - wanted).abs().max() < 8 / 255 * wanted.max()
        assert (roots - wanted).abs().mean() < 2 / 255 * wanted.max()


class Noise:
    lr, decays = 1e-2, (1e-3, 0.1)

    def model(self) -> nn.Module:
        return nn.Linear(10, 1, bias=False)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(10, generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()

    held_out = logits = None


def watched(contender: Contender, steps: int) -> Watched:
    lesson = Watched(Noise(), contender, seed=2, steps=1000)
    lesson.begin_window()
    for _ in range(steps):
        lesson.step(next(lesson.batches()))
    return lesson


@pytest.mark.parametrize("name", [ADAMS, ADAMW])
def test_float32_deviates_by_nothing(name: str) -> None:
    (contender,) = (contender for contender in CONTENDERS if contender.name == name)
    assert watched(contender, steps=1).largest_update == pytest.approx(1, rel=1e-3)  # Adam's, whatever the gradient
    point = watched(contender, steps=4).point(is_last=False)
    assert (point["sum_of_v"], point["mean_of_v"]) == pytest.approx((0, 0), abs=1e-6)
    halved = Contender("halved", name, contender.build, lambda optimizer, param: exp_avg_sq(optimizer, param) / 2)
    assert watched(halved, steps=3).point(is_last=False)["sum_of_v"] == pytest.approx(-0.5, abs=1e-6)


def made_up(contender: str, losses: list[float]) -> list[dict[str, Any]]:
    return [
        {"contender": contender, "seed": seed, "train_loss": x, "held_out_loss": x} for seed, x in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("shift", "judged", "said"),
    [
        (0.05, "no worse", "within"),
        (-0.05, "no worse", "within"),
        (-0.2, "no worse", "lower"),
        (0.2, "WORSE", "HIGHER"),
    ],
)
def test_verdict_is_by_the_spread_of_the_reference(shift: float, judged: str, said: str) -> None:
    losses = [1.0, 1.1, 1.2]
    rows = made_up(ADAMS, losses) + made_up(EIGHT_BIT, [loss + shift for loss in losses])
    verdict = eight_bit_findings.verdict(rows, EIGHT_BIT, ADAMS)
    assert f"is {judged} than {ADAMS}: training loss {shift:+.4f}, {said}" in verdict
    assert "of 0.1000" in verdict
    assert "not judged" in eight_bit_findings.verdict([rows[0], rows[3]], EIGHT_BIT, ADAMS)


def test_command_and_continuing_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path), "--contender", EIGHT_BIT]
    eight_bit_training.main([*arguments, "--task", "cnn"])
    rows = read_rows(tmp_path / "eight_bit_training.csv")
    assert [(row["contender"], row["seed"]) for row in rows] == [(n, s) for n in (ADAMS, EIGHT_BIT) for s in (0, 1)]
    assert REFERENCES[EIGHT_BIT] == ADAMS
    first = {row["seed"]: row for row in rows if row["contender"] == ADAMS}
    assert first[0]["train_loss"] != first[1]["train_loss"]
    for row in rows:
        assert row["train_loss"] == pytest.approx(first[row["seed"]]["train_loss"], rel=0.01)
    assert f"cnn: {EIGHT_BIT} is" in capsys.readouterr().out
    eight_bit_training.main([*arguments, "--task", "gpt"])
    both = read_rows(tmp_path / "eight_bit_training.csv")
    assert [row for row in both if row["task"] == "cnn"] == rows
    assert [row["task"] for row in both] == 4 * ["cnn"] + 4 * ["gpt"]
    with pytest.raises(SystemExit):
        eight_bit_training.main(["--contender", "no such thing"])
    assert "No contender" in capsys.readouterr().err
