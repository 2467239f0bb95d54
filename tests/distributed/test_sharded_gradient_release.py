"""Gradient release of sharded models: the lagged step bit for bit. Wrappers that reduce too late are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from swd_fused import FusedAdamS
from swd_fused.drivers import release as gradient_release
from tests.distributed.ranks import once_on_ranks
from tests.distributed.sharded_model import LR, Record, new_model, param_groups, train
from tests.distributed.test_sharded import TP_PLAN, my_part


def fsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = new_model()
    for layer in (model.side, model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(new_model(), mesh=mesh)


def replicated() -> nn.Module:
    """FSDP2 in the place of DistributedDataParallel."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(new_model(), mesh=mesh)


def tp_fsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(new_model(), mesh["tp"], TP_PLAN)
    return fully_shard(model, mesh=mesh["dp"])


def part_of(build: Callable[[], nn.Module]) -> slice:
    if build is tp_fsdp:
        return my_part(dist.get_rank() // 2, 2)
    return my_part(dist.get_rank(), dist.get_world_size())


def trained(build: Callable[[], nn.Module], gathered: int | None, **options: Any) -> tuple[Record, list[int]]:
    """A run, and the number of gradients that were left to each `step()`; resumed in the middle."""
    model = build()
    left: list[int] = []
    before = gradient_release.GATHERED_BYTES

    def step(optimizer: FusedAdamS) -> None:
        left.append(sum(param.grad is not None for param in model.parameters()))
        optimizer.step()
        if gathered is None:
            release.remove()

    means, state = [], None
    for steps in (range(6), range(6, 12)):
        optimizer = FusedAdamS(param_groups(model), lr=LR, schedule="lagged", **options)
        if state is not None:
            optimizer.load_state_dict(state)
        # Ordinary steps too begin with a first one that is taken by parts: it rounds the mean in another way.
        gradient_release.GATHERED_BYTES = gathered or 1 << 30
        release = optimizer.release_gradients()
        record = train(model, optimizer, steps, part_of(build), step=step)
        means += list(zip(record.means, record.grad_norms, strict=True))
        state = optimizer.state_dict()
    gradient_release.GATHERED_BYTES = before
    record.means = [mean for mean, _ in means]
    record.grad_norms = [norm for _, norm in means]
    return record, left


def both(*builds: Callable[[], nn.Module]) -> dict[str, Any]:
    return {
        f"{build.__name__} {gathered}": (trained(build, None), trained(build, gathered))
        for build in builds
        for gathered in (1, 500)
    }


def refused() -> list[str]:
    """What DistributedDataParallel's parameters get to hear, wrapped before gradient release and after it; and those of
    FullyShardedDataParallel, which needs a GPU, by the mark that it leaves."""
    messages = []
    for kind in ("wrapped before", "wrapped after", "marked"):
        model: nn.Module = nn.Linear(4, 3)
        if kind == "wrapped before":
            model = DistributedDataParallel(model)
        for param in model.parameters():
            param._fsdp_flattened = kind == "marked"
        optimizer = FusedAdamS(model.parameters(), schedule="lagged")
        try:
            optimizer.release_gradients()
            model = DistributedDataParallel(model)
            model(next(model.parameters()).new_ones(2, 4)).sum().backward()
            messages.append("not refused")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


CASES = [(2, "fsdp"), (2, "replicated"), (4, "hsdp"), (4, "tp_fsdp")]


@pytest.mark.parametrize("gathered", [1, 500])
@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_equals_the_lagged_step_bit_for_bit(world_size: int, name: str, gathered: int) -> None:
    builds = (fsdp, replicated) if world_size == 2 else (hsdp, tp_fsdp)
    for result in once_on_ranks(world_size, both, *builds):
        (expected, all_left), (record, left) = result[f"{name} {gathered}"]
        assert record.means == expected.means
        np.testing.assert_allclose(record.grad_norms, expected.grad_norms, rtol=1e-12)
        for key, value in expected.params.items():
            assert np.array_equal(record.params[key], value), key
        assert left[0] == all_left[0] > 0  # a first step is exact, and needs them all
        assert all(count == 0 for count in left[1:]) if gathered == 1 else sum(left[1:]) < sum(all_left[1:])


def test_wrappers_that_reduce_later_are_refused() -> None:
    for messages in once_on_ranks(2, refused):
        assert len(messages) == 3
        assert all("reduces gradients over ranks only after autograd" in message for message in messages)
        assert ["DistributedDataParallel" in message for message in messages] == [True, True, False]
