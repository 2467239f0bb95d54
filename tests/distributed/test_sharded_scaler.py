"""torch's GradScaler on one mesh: an infinity on some ranks makes all skip. On several meshes it is refused."""

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
from tests.distributed.ranks import once_on_ranks
from tests.distributed.sharded_model import loss_of, new_model, whole
from tests.distributed.test_sharded import TP_PLAN

STEPS = 4
INFINITE = 2  # the step in which some ranks have an infinity: with HSDP both copies of a shard


def fsdp() -> nn.Module:
    return fully_shard(new_model(torch.float32), mesh=init_device_mesh("cpu", (4,)))


def hsdp() -> nn.Module:
    return fully_shard(new_model(torch.float32), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))


def tp_fsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(new_model(torch.float32), mesh["tp"], TP_PLAN), mesh=mesh["dp"])


def stepped(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Which steps were taken, and what the scale was after each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = FusedAdamS(model.parameters(), lr=1e-2, **options)
    taken, scales = [], []
    for t in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, dtype=torch.float32)).backward()
        if t == INFINITE and dist.get_rank() % 2 == 1:
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


def refused(model: nn.Module, **options: Any) -> str:
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError) as raised:
        stepped(model, **options)
    assert all(torch.equal(whole(param), whole(old)) for param, old in zip(model.parameters(), before, strict=True))
    return str(raised.value)


def run_cases() -> dict[str, Any]:
    answers: dict[str, Any] = {build.__name__: (stepped(build()), unscaled(build())) for build in (fsdp, hsdp)}
    refusals = [refused(tp_fsdp()), refused(new_model(torch.float32), process_group=dist.group.WORLD)]
    return {**answers, "refused": refusals}


@pytest.mark.parametrize("case", ["fsdp", "hsdp"])
def test_all_ranks_skip_what_some_of_them_must(case: str) -> None:
    for answers in once_on_ranks(4, run_cases):
        answer, mean = answers[case]
        assert answer["taken"] == [t != INFINITE for t in range(STEPS)]
        assert answer["scales"] == [8.0, 8.0, 4.0, 4.0]
        assert answer["mean"] == pytest.approx(mean, rel=1e-6)  # unscaled, and without a trace of the bad step


def test_scales_that_would_drift_apart_are_refused() -> None:
    for answers in once_on_ranks(4, run_cases):
        assert len(answers["refused"]) == 2
        assert all("several device meshes or with a process_group" in message for message in answers["refused"])
