"""The examples, for real, on two ranks: each framework trains what one process does. Skipped where one is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 300


def trained_on_one_process(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tiny_task: dict[str, Any] = {"__name__": "tiny_task"}
    exec((EXAMPLES / "tiny_task.py").read_text(), tiny_task)
    model = tiny_task["new_model"](dtype)
    groups = tiny_task["param_groups"](model)
    optimizer = FusedAdamS(groups, lr=tiny_task["LR"], max_grad_norm=tiny_task["MAX_GRAD_NORM"], backend="torch")
    for x, y in torch.utils.data.DataLoader(tiny_task["dataset"](dtype), batch_size=tiny_task["BATCH"]):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


def trained_by(path: Path, *command: str) -> dict[str, torch.Tensor]:
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    run = subprocess.run(
        [sys.executable, *command, "--save", str(path)],
        env=environment,
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert "rms gradient" in run.stdout
    return torch.load(path)  # type: ignore[no-any-return]


def by_torchrun(example: str, *options: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, str(EXAMPLES / example), *options]


def assert_as_on_one_process(weights: dict[str, torch.Tensor], dtype: torch.dtype, tolerance: float) -> None:
    reference = trained_on_one_process(dtype)
    assert set(weights) == set(reference)
    for name, value in reference.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=tolerance)


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    weights = trained_by(tmp_path / "weights", *by_torchrun("with_accelerate.py"))
    assert_as_on_one_process(weights, torch.float64, 1e-12)


def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    weights = trained_by(tmp_path / "weights", *by_torchrun("with_transformers.py"))
    assert_as_on_one_process(weights, torch.float64, 1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("lightning")
    weights = trained_by(tmp_path / "weights", *by_torchrun("with_lightning.py", "--strategy", strategy))
    assert_as_on_one_process(weights, torch.float64, 1e-12)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed(tmp_path: Path, stage: str) -> None:
    """In float32, as DeepSpeed keeps its weights."""
    pytest.importorskip("deepspeed")
    weights = trained_by(tmp_path / "weights", *by_torchrun("with_deepspeed.py", "--stage", stage))
    assert_as_on_one_process(weights, torch.float32, 1e-6)
