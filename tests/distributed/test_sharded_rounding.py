"""Stochastic rounding of shards: the bits of the whole tensor, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from swd_fused import FusedAdamS
from swd_fused.state.element_numbers import element_numbers
from tests.distributed.ranks import once_on_ranks
from tests.distributed.sharded_model import whole
from tests.runs import random_grads

RANKS, STEPS = 4, 3
BACKENDS = ["torch", "cpu"]  # the ranks are on the CPU, wherever other tests run
SHAPES = [(13, 12), (13,), (12, 11), (12,), (3, 12), (3,), (6, 5, 8), (7, 10)]

# Without the mean: sums over ranks have other last bits than those of one process.
OPTIONS: dict[str, Any] = {"lr": 1e-2, "decay": "decoupled", "stochastic_rounding": True, "seed": 9}


def new_params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(torch.bfloat16)) for shape in SHAPES]


def trained(params: list[nn.Parameter], backend: str) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = FusedAdamS(params, backend=backend, **OPTIONS)
    for step_grads in random_grads(SHAPES, STEPS, torch.bfloat16):
        for param, grad in zip(params, step_grads, strict=True):
            is_cut = hasattr(param, "placements")
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_cut else grad
        optimizer.step()
    return [whole(param) for param in params]


def sharded() -> dict[str, Any]:
    """FSDP of uneven and empty shards; FSDP above tensor parallelism, along one dimension and along two; shards along
    inner dimensions, one of them of one column."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (RANKS,))
    results: dict[str, Any] = {}
    for backend in BACKENDS:
        whole_params = new_params()
        model = nn.Sequential(nn.Linear(12, 13), nn.Linear(11, 12), nn.Linear(12, 3)).to(torch.bfloat16)
        with torch.no_grad():
            for param, value in zip(model.parameters(), whole_params, strict=False):
                param.copy_(value)
        parallelize_module(model[1], mesh["tp"], ColwiseParallel())
        parallelize_module(model[2], mesh["tp"], RowwiseParallel())
        fully_shard(model[0], mesh=line)
        fully_shard(model[1:], mesh=mesh["dp"])
        others = [
            nn.Parameter(distribute_tensor(whole_params[6].detach(), mesh, [Shard(2), Shard(1)])),
            nn.Parameter(distribute_tensor(whole_params[7].detach(), mesh, [Replicate(), Shard(1)])),
        ]
        params = [*model.parameters(), *others]
        results[backend] = [tensor.float().numpy() for tensor in trained(params, backend)]
        results["placements"] = [str(param.placements) for param in params]
    own = torch.zeros(5, 4)
    results["first number of a plain shard"] = element_numbers(own, (dist.group.WORLD,)).first
    return results


@pytest.mark.parametrize("on", BACKENDS)
def test_shards_are_rounded_as_the_whole(on: str) -> None:
    answers = once_on_ranks(RANKS, sharded)
    assert any("_StridedShard" in placements for placements in answers[0]["placements"])
    unsharded = trained(new_params(), on)
    for answer in answers:
        for shape, found, wanted in zip(SHAPES, answer[on], unsharded, strict=True):
            assert torch.equal(torch.from_numpy(found), wanted.float()), shape


def test_plain_shards_are_numbered_apart() -> None:
    """Nobody knows which part of what they are; but no two ranks draw the same bits."""
    firsts = [answer["first number of a plain shard"] for answer in once_on_ranks(RANKS, sharded)]
    assert firsts == [rank * 2**40 for rank in range(RANKS)]
