"""`python -m swd_fused`: it runs, finds what is there, and would notice a backend that computes something else."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from swd_fused import __main__ as self_test
from swd_fused import __version__
from tests.definition import WRONG, AdamS, Group


def test_report() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "swd_fused"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"swd_fused {__version__} in" in run.stdout
    assert f"torch     {torch.__version__}" in run.stdout
    assert "cpu    on cpu: ok" in run.stdout
    assert "torch  on cpu: ok" in run.stdout
    assert "triton on cpu: not used: its kernels are for CUDA and ROCm GPUs\n" in run.stdout


def trained_by(definition: type[AdamS]) -> list[torch.Tensor]:
    optimizer = self_test.new_optimizer("torch", "cpu", torch.float64)
    names = ("lr", "betas", "eps", "weight_decay", "max_decay")
    groups = [Group([i], **{name: group[name] for name in names}) for i, group in enumerate(optimizer.param_groups)]
    trained = definition([param.numpy() for param in optimizer.numbered_params()], groups, optimizer.max_grad_norm)
    optimizer.step = lambda: trained.step([param.grad.numpy() for param in optimizer.numbered_params()])  # type: ignore
    self_test.trained(optimizer)
    return [torch.from_numpy(np.asarray(param, dtype=np.float64)) for param in trained.params]


def largest_difference(weights: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(weights, others, strict=True))


def test_it_compares_with_the_definition() -> None:
    assert largest_difference(self_test.defined(), trained_by(AdamS)) < 1e-13


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_definitions_are_beyond_the_tolerance(wrong: type[AdamS]) -> None:
    assert largest_difference(trained_by(AdamS), trained_by(wrong)) > 10 * self_test.TOLERANCE


def test_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that computes something else, and one that raises, are in the report and in the exit code."""
    right = self_test.defined()
    monkeypatch.setattr(sys, "argv", ["swd_fused"])
    monkeypatch.setattr(self_test, "defined", lambda: [weight + 1e-3 for weight in right])
    assert self_test.main() == 1
    assert "torch  on cpu: FAILED, largest difference 1.0e-03" in capsys.readouterr().out
    monkeypatch.setattr(self_test, "defined", lambda: right)

    def raises(*args: object) -> None:
        raise ValueError("the driver is too old")

    monkeypatch.setattr(self_test.FusedAdamS, "step", raises)
    assert self_test.main() == 1
    assert "torch  on cpu: FAILED with ValueError: the driver is too old" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cpu", False), ("xpu", False)])
def test_a_missing_backend_is_a_failure_where_it_could_be_had(
    device: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object) -> None:
        raise RuntimeError("not installed")

    monkeypatch.setattr(self_test, "new_optimizer", missing)
    outcome = "MISSING: not installed" if expected else "not used: its kernels are for CUDA and ROCm GPUs"
    assert self_test.tested("triton", device) == (not expected, outcome)
