"""`python -m swd_fused`: it runs, finds what is there, and would notice a backend that computes something else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from swd_fused import __main__ as self_test
from swd_fused import __version__
from tests.definition import WRONG, AdamS, Group

ROOT = Path(__file__).parents[2]
# Without the finder of an editable installation, which would supply the kernels that a copy lacks.
WITHOUT_EDITABLE_FINDER = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
"""


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


@pytest.mark.slow
def test_in_a_source_tree_without_kernels(tmp_path: Path) -> None:
    """The check says what to do. Without NumPy, of which torch warns."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "swd_fused", tree / "swd_fused", ignore=ignored)
    shutil.copy(ROOT / "setup.py", tree)
    (tree / "csrc").mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT_EDITABLE_FINDER)
    (site / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    run = subprocess.run(
        [sys.executable, "-m", "swd_fused"],
        cwd=tree,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, [site, tree]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr == ""
    assert run.returncode == 1
    assert "cpu    on cpu: MISSING: " in run.stdout
    assert f"run `pip install -e .` in {tree}, a source tree without kernels" in run.stdout
    assert "start Python in another folder" in run.stdout
