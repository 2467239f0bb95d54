"""Masters in two bytes, sharded: those of one process to the bit, saved on 2 ranks and resumed on 1, 2 and 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from swd_fused import FusedAdamS
from tests.distributed.ranks import on_ranks
from tests.distributed.sharded_model import whole

HALF, STEPS = 3, 6

# Without a mean over all ranks, whose last bit depends on their number.
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "decay": "decoupled", "master_weights": True}


def new_run() -> tuple[nn.Module, FusedAdamS]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5)).to(torch.bfloat16)
    if dist.is_initialized() and dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, FusedAdamS(model.parameters(), **OPTIONS)


def train(model: nn.Module, optimizer: FusedAdamS, steps: range) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=random).to(torch.bfloat16)
            is_shard = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_shard else grad
        optimizer.step()


def masters(model: nn.Module, optimizer: FusedAdamS) -> list[Tensor]:
    return [whole(optimizer.master_param(param)).clone() for param in model.parameters()]


def state_of(model: nn.Module, optimizer: FusedAdamS) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(directory: Path) -> list[Tensor]:
    model, optimizer = new_run()
    train(model, optimizer, range(HALF))
    dcp.save(state_of(model, optimizer), checkpoint_id=directory)
    train(model, optimizer, range(HALF, STEPS))
    return masters(model, optimizer)


def resume(directory: Path) -> list[Tensor]:
    model, optimizer = new_run()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(HALF, STEPS))
    return masters(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Tensor]]]:
    directory = tmp_path_factory.mktemp("masters")
    return directory, on_ranks(2, save, directory)


def test_shards_have_the_masters_of_one_process(saved: tuple[Path, list[list[Tensor]]]) -> None:
    model, optimizer = new_run()
    train(model, optimizer, range(STEPS))
    expected = masters(model, optimizer)
    assert not any(torch.equal(master, master.bfloat16().float()) for master in expected)
    for found in saved[1]:
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resumed_equals_uninterrupted(saved: tuple[Path, list[list[Tensor]]], ranks: int) -> None:
    for found in on_ranks(ranks, resume, saved[0]):
        assert all(map(torch.equal, found, saved[1][0]))
