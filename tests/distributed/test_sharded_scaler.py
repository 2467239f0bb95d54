"""GradScaler on shards: an infinity on one rank makes all ranks skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from swd_fused import FusedAdamS
from swd_fused.distributed.grad_scaler import MeshGradScaler
from tests.distributed.ranks import once_on_ranks
from tests.distributed.sharded_model import loss_of, new_model
from tests.distributed.test_sharded import TP_PLAN

STEPS = 4
INFINITE = 2  # the step in which one rank has an infinity


def fsdp() -> nn.Module:
    return fully_shard(new_model(torch.float32), mesh=init_device_mesh("cpu", (4,)))


def tp_beside_plain_tensors() -> nn.Module:
    return parallelize_module(new_model(torch.float32), init_device_mesh("cpu", (4,)), TP_PLAN)


def tp_fsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(new_model(torch.float32), mesh["tp"], TP_PLAN), mesh=mesh["dp"])


def stepped(model: nn.Module, scaler: Any) -> dict[str, Any]:
    """Which steps were taken, and what the scale was after each."""
    optimizer = FusedAdamS(model.parameters(), lr=1e-2)
    taken, scales = [], []
    for t in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, dtype=torch.float32)).backward()
        if t == INFINITE and dist.get_rank() == 3:
            grad = model.up.weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = torch.inf
        skipped = int(optimizer.skipped_steps)
        scaler.step(optimizer)
        taken.append(int(optimizer.skipped_steps) == skipped)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"taken": taken, "scales": scales, "mean": float(optimizer.exp_avg_sq_mean)}


def unscaled(model: nn.Module) -> float:
    optimizer = FusedAdamS(model.parameters(), lr=1e-2)
    for _ in range(STEPS - 1):
        optimizer.zero_grad()
        loss_of(model, 0, dtype=torch.float32).backward()
        optimizer.step()
    return float(optimizer.exp_avg_sq_mean)


def run_cases() -> dict[str, Any]:
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
    answers: dict[str, Any] = {"torch's, fsdp": (stepped(fsdp(), scaler), unscaled(fsdp()))}
    for layout in (fsdp, tp_beside_plain_tensors, tp_fsdp):
        scaler = MeshGradScaler("cpu", init_scale=8.0)
        answers[layout.__name__] = stepped(layout(), scaler), unscaled(layout())
    return answers


@pytest.mark.parametrize("case", ["torch's, fsdp", "fsdp", "tp_beside_plain_tensors", "tp_fsdp"])
def test_all_ranks_skip_what_one_of_them_must(case: str) -> None:
    for answers in once_on_ranks(4, run_cases):
        answer, mean = answers[case]
        assert answer["taken"] == [t != INFINITE for t in range(STEPS)]
        assert answer["scales"] == [8.0, 8.0, 4.0, 4.0]
        assert answer["mean"] == pytest.approx(mean, rel=1e-6)  # unscaled, and without a trace of the bad step
