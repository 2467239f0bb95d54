"""How far the decay can grow early in training, and that the paper's settings do not warn of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import (
    early_decay,
)
from benchmarks.conditions import read_rows
from benchmarks.paper.presets import PAPER
from swd_fused import FusedAdamS
from swd_fused.step.decay_warning import EARLY_STEPS, FAR_BEYOND_ADAMW

ROOT = Path(__file__).parents[2]


def test_the_decay_cannot_grow_faster_than_by_zero_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = FusedAdamS([param], eps=1e-30)
    decays = []
    for grad in [1.0, 2.0, 3.0, *[0.0] * 17]:
        param.grad = torch.full_like(param, grad)
        optimizer.step()
        decays += optimizer.effective_weight_decay()
    assert decays[19] / decays[2] == pytest.approx(early_decay.growth(3, until=20), rel=1e-9)


def test_the_papers_lambda_does_not_warn_on_the_papers_models() -> None:
    """By stored results, since a step of these models takes seconds. The page repeats them."""
    rows = read_rows(ROOT / "benchmarks" / "results" / "paper" / "early_decay.csv")
    assert [row["model"] for row in rows] == [task.model for task in PAPER.tables]
    assert {float(row["weight_decay"]) for row in rows} == {5e-4}
    most = max(float(row[f"at_most_in_{EARLY_STEPS}_steps"]) for row in rows)
    assert most < FAR_BEYOND_ADAMW / 5
    acts_like = sorted(float(row["acts_like"]) for row in rows)
    page = " ".join((ROOT / "docs" / "weight-decay.md").read_text().split())
    assert f"{acts_like[0]:.2g} to {acts_like[-1]:.2g} after 5 steps" in page
    assert f"at most {most:.2g}" in page
