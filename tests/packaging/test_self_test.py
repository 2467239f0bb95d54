"""`python -m swd_fused`: it runs, finds what is there, and would notice a backend that computes something else."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from swd_fused import __version__, self_test
from tests.definition import AdamS, Group


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


def defined() -> list[torch.Tensor]:
    params, grads = self_test._random_training()
    groups = [
        Group([i], self_test.LR, self_test.BETAS, self_test.EPS, decay, max_decay=self_test.MAX_DECAY)
        for i, decay in enumerate(self_test.WEIGHT_DECAYS)
    ]
    trained = AdamS([param.numpy() for param in params], groups, self_test.MAX_GRAD_NORM)
    for of_step in grads:
        trained.step([grad.numpy() for grad in of_step])
    return [torch.from_numpy(np.asarray(param, dtype=np.float64)) for param in trained.params]


def test_its_definition_is_the_definition() -> None:
    found = self_test.defined(*self_test._random_training())
    assert max((a - b).abs().max().item() for a, b in zip(found, defined(), strict=True)) < 1e-14


def test_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that computes something else, and one that raises, are in the report and in the exit code."""
    from swd_fused import __main__

    right = self_test.defined
    monkeypatch.setattr(sys, "argv", ["swd_fused"])
    monkeypatch.setattr(self_test, "defined", lambda *args: [weight + 1e-3 for weight in right(*args)])
    assert __main__.main() == 1
    assert "torch  on cpu: FAILED, largest difference 1.0e-03" in capsys.readouterr().out
    monkeypatch.setattr(self_test, "defined", right)

    def raises(*args: object) -> None:
        raise ValueError("the driver is too old")

    monkeypatch.setattr(self_test.FusedAdamS, "step", raises)
    assert __main__.main() == 1
    assert "torch  on cpu: FAILED with ValueError: the driver is too old" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cpu", False), ("xpu", False)])
def test_a_missing_backend_is_a_failure_where_it_could_be_had(device: str, expected: bool) -> None:
    result = self_test.Result("triton", device, missing="not installed")
    assert result.failed == expected
    outcome = "MISSING: not installed" if expected else "not used: its kernels are for CUDA and ROCm GPUs"
    assert str(result) == f"triton on {device}: {outcome}"
