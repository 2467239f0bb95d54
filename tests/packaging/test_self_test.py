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

from swd_fused import __version__, self_test
from swd_fused.options import BackendName
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


@pytest.mark.parametrize("where", ["a source tree", "a tree that hides the package"])
def test_report_without_numpy_has_no_warnings(where: str, tree: Path) -> None:
    """torch warns when it is imported without NumPy, which this package has no use for."""
    installed = tree.parent / "installed"
    copy_package(installed, kernels=True)
    without_numpy = tree.parent / "without_numpy"
    without_numpy.mkdir()
    (without_numpy / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    run = check_in(installed if where == "a source tree" else tree, without_numpy, installed)
    assert run.returncode == 0
    assert run.stderr == ""


def trained_by(definition: type[AdamS]) -> list[torch.Tensor]:
    params, grads = self_test._random_training()
    groups = [
        Group([i], self_test.LR, self_test.BETAS, self_test.EPS, decay, max_decay=self_test.MAX_DECAY)
        for i, decay in enumerate(self_test.WEIGHT_DECAYS)
    ]
    trained = definition([param.numpy() for param in params], groups, self_test.MAX_GRAD_NORM)
    for of_step in grads:
        trained.step([grad.numpy() for grad in of_step])
    return [torch.from_numpy(np.asarray(param, dtype=np.float64)) for param in trained.params]


def largest_difference(weights: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(weights, others, strict=True))


def test_its_definition_is_the_definition() -> None:
    assert largest_difference(self_test.defined(*self_test._random_training()), trained_by(AdamS)) < 1e-14


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_definitions_are_beyond_the_tolerance(wrong: type[AdamS]) -> None:
    assert largest_difference(trained_by(AdamS), trained_by(wrong)) > 10 * self_test.TOLERANCE


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


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("cpu", "cpu", True),
        ("triton", "cuda", True),
        ("triton", "cpu", False),  # in the interpreter only
        ("triton", "xpu", False),
    ],
)
def test_a_missing_backend_is_a_failure_where_it_could_be_had(name: BackendName, device: str, expected: bool) -> None:
    result = self_test.Result(name, device, missing="not installed")
    assert result.failed == expected
    outcome = "MISSING: not installed" if expected else "not used: its kernels are for CUDA and ROCm GPUs"
    assert str(result) == f"{name:<6} on {device}: {outcome}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree whose kernels are not built."""
    copy_package(tmp_path / "tree", kernels=False)
    shutil.copy(ROOT / "setup.py", tmp_path / "tree")
    (tmp_path / "tree" / "csrc").mkdir()
    return tmp_path / "tree"


def copy_package(folder: Path, kernels: bool) -> None:
    left_out = shutil.ignore_patterns("__pycache__", *([] if kernels else ["*.so"]))
    shutil.copytree(ROOT / "swd_fused", folder / "swd_fused", ignore=left_out)


def check_in(tree: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs the check in a source tree, with this on Python's path."""
    (tree.parent / "site").mkdir()
    (tree.parent / "site" / "sitecustomize.py").write_text(WITHOUT_EDITABLE_FINDER)
    python_path = os.pathsep.join(map(str, [tree.parent / "site", *path]))
    return subprocess.run(
        [sys.executable, "-m", "swd_fused"],
        cwd=tree,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("also_on_the_path", [False, True])
def test_in_a_source_tree_without_kernels_the_installed_package_is_checked(tree: Path, also_on_the_path: bool) -> None:
    installed = tree.parent / "installed"
    copy_package(installed, kernels=True)
    run = check_in(tree, *([tree] if also_on_the_path else []), installed)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{tree} is a source tree without kernels, and hides the package in {installed / 'swd_fused'}" in run.stdout
    assert f"swd_fused {__version__} in {installed / 'swd_fused'}\n" in run.stdout
    assert "cpu    on cpu: ok" in run.stdout


@pytest.mark.slow
def test_in_a_source_tree_without_kernels_and_nothing_installed_the_check_says_what_to_do(tree: Path) -> None:
    run = check_in(tree)
    assert run.returncode == 1
    assert "cpu    on cpu: MISSING: " in run.stdout
    assert f"run `pip install -e .` in {tree}, which builds them there" in run.stdout


def test_help_has_the_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from swd_fused import __main__

    monkeypatch.setattr(sys, "argv", ["swd_fused", "--help"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "missing that this machine could have" in capsys.readouterr().out
