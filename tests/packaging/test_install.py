"""`pip install .`: one file for all Pythons and torches to come, and a whole package where no compiler works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["csrc", "swd_fused", "setup.py", "pyproject.toml", "README.md", "LICENSE"]


def run(*command: object, **variables: str) -> str:
    env = {**os.environ, **variables}
    result = subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def installed(directory: Path, **variables: str) -> tuple[str, Path, str]:
    """Builds a wheel from a copy of the sources. Returns its name, where it is installed, and pip's output."""
    source = directory / "source"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    log = run("-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", directory, source, **variables)
    (wheel,) = directory.glob("*.whl")
    target = directory / "installed"
    run("-m", "pip", "install", "--no-deps", "--target", target, wheel)
    return wheel.name, target, log


# Without the finder of an editable installation, which would supply the kernels that this one lacks.
STEP = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
import torch, swd_fused
param = torch.nn.Parameter(torch.ones(3))
param.grad = torch.ones(3)
optimizer = swd_fused.FusedAdamS([param])
optimizer.step()
assert (param < 1).all()
print(swd_fused.__file__, swd_fused.__version__, optimizer)
"""


def test_with_a_compiler(tmp_path: Path) -> None:
    wheel, target, _ = installed(tmp_path)
    assert "-cp310-abi3-" in wheel
    output = run("-P", "-c", STEP, PYTHONPATH=str(target))
    assert str(target) in output
    assert "backend: cpu\n" in output


def test_without_a_compiler(tmp_path: Path) -> None:
    broken = shutil.which("false")
    assert broken
    _, target, log = installed(tmp_path, CC=broken, CXX=broken)
    assert "swd_fused will run on its plain PyTorch backend" in log
    output = run("-P", "-c", STEP, PYTHONPATH=str(target))
    assert str(target) in output
    assert "backend: torch (the C++ kernels are not built" in output


def test_asking_for_kernels_that_are_not_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from swd_fused import FusedAdamS, backends

    monkeypatch.setattr(backends, "load_cpu_backend", lambda: "the C++ kernels are not built (a reason)")
    backends.choose.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"not built \(a reason\).*pip install --no-build-isolation"):
            FusedAdamS([torch.nn.Parameter(torch.ones(3))], backend="cpu")
    finally:
        backends.choose.cache_clear()
