"""FusedAdamS on shards equals the definition on one process.

Each world size is started once, for all cases: a test looks at what its case returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from swd_fused import FusedAdamS
from tests.distributed import sharded_model
from tests.distributed.ranks import counted_all_reduces, once_on_ranks
from tests.distributed.sharded_model import LR, VARIANTS, Record, distance, new_model, param_groups, train

TP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def counted(options: dict[str, Any], model: nn.Module, part: slice) -> tuple[Record, list[int]]:
    """A run, and the number of its all-reduces in each step of the optimizer."""
    optimizer = FusedAdamS(param_groups(model), lr=LR, **options)
    calls: list[int] = []
    travelling: list[int] = []

    def step(optimizer: FusedAdamS) -> None:
        with counted_all_reduces(calls):
            optimizer.step()
        reduction = optimizer._stepper._step_before._reduction
        travelling.append(0 if reduction is None else len(reduction._travelling))

    record = train(model, optimizer, part=part, step=step)
    record.travelling = travelling
    record.rms_grads = list(optimizer.rms_grads().values())
    return record, calls


def my_part(index: int, parts: int) -> slice:
    return slice(16 // parts * index, 16 // parts * (index + 1))


def fsdp(policy: OffloadPolicy = OffloadPolicy(), **options: Any) -> tuple[Record, list[int]]:  # noqa: B008
    model = new_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.side, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return counted(options, model, my_part(dist.get_rank(), dist.get_world_size()))


def offloaded(**options: Any) -> tuple[Record, list[int]]:
    """Of a mesh of GPUs: tests/distributed/test_gpu_offloaded_shards.py."""
    return fsdp(CPUOffloadPolicy(pin_memory=False), **options)


def tensor_parallel(**options: Any) -> tuple[Record, list[int]]:
    """All of the model but `up` and `down` are plain tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return counted(options, parallelize_module(new_model(), mesh, TP_PLAN), slice(None))


def ddp(**options: Any) -> tuple[Record, list[int]]:
    model = DistributedDataParallel(new_model(), find_unused_parameters=True)
    record, calls = counted(options, model, my_part(dist.get_rank(), dist.get_world_size()))
    record.params = {name.removeprefix("module."): value for name, value in record.params.items()}
    return record, calls


def hsdp(**options: Any) -> tuple[Record, list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(new_model(), mesh=mesh)
    return counted(options, model, my_part(dist.get_rank(), 4))


def tp_fsdp(**options: Any) -> tuple[Record, list[int]]:
    """`up` and `down` are sharded over both dimensions, strided where both cut the same one, the rest over one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(new_model(), mesh["tp"], TP_PLAN)
    fully_shard(model, mesh=mesh["dp"])
    return counted(options, model, my_part(mesh["dp"].get_local_rank(), 2))


CLIP = {"max_grad_norm": sharded_model.MAX_GRAD_NORM}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": CLIP,
    "torch backend": {**CLIP, "backend": "torch"},
    "not clipping": {},
    "amsgrad": {**CLIP, **VARIANTS},
    "lagged": {"schedule": "lagged"},
}
LAYOUTS = {2: [fsdp, offloaded, tensor_parallel, ddp], 4: [fsdp, tensor_parallel, hsdp, tp_fsdp]}
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    size: {
        f"{layout.__name__}, {name}": partial(layout, **options)
        for layout in layouts
        for name, options in OPTIONS.items()
    }
    for size, layouts in LAYOUTS.items()
}


def run_cases(size: int) -> dict[str, Any]:
    return {name: case() for name, case in CASES[size].items()}


def results(size: int) -> list[dict[str, Any]]:
    return once_on_ranks(size, run_cases, size)


@cache
def expected(options: str) -> Record:
    given = OPTIONS[options]
    variants = VARIANTS if "amsgrad" in given else {}
    return sharded_model.defined(given.get("max_grad_norm"), "schedule" in given, **variants)


RUNS = [(size, layout.__name__, options) for size in LAYOUTS for layout in LAYOUTS[size] for options in OPTIONS]


# One for each process group that anything is sharded over. amsgrad takes another round.
ALL_REDUCES = {"fsdp": 1, "offloaded": 1, "tensor_parallel": 1, "ddp": 0, "hsdp": 1, "tp_fsdp": 2}


@pytest.mark.parametrize(("size", "layout", "options"), RUNS)
def test_sharded_equals_the_definition_on_one_process(size: int, layout: str, options: str) -> None:
    """Over clipping, a warm-up and decay of lr, groups with and without decay, a gradient that comes and goes. The mean
    is bitwise the same on all ranks, and only lagged sums travel while the model computes."""
    reference = expected(options)
    is_lagged = options == "lagged"
    for answers in results(size):
        record, calls = answers[f"{layout}, {options}"]
        assert distance(record, reference) < 1e-12
        torch.testing.assert_close(record.means, reference.means, rtol=1e-10, atol=0)
        torch.testing.assert_close(record.rms_grads, reference.rms_grads, rtol=1e-10, atol=0)
        assert record.means == results(size)[0][f"{layout}, {options}"][0].means
        if not is_lagged:
            torch.testing.assert_close(record.grad_norms, reference.grad_norms, rtol=1e-10, atol=0)
        # The first step of a lagged run is exact.
        assert set(calls[1:]) == {ALL_REDUCES[layout] * (2 if options == "amsgrad" else 1)}
        assert record.travelling == [int(is_lagged and layout != "ddp")] * sharded_model.STEPS


# --- torch.compile, of the model and of the step


def compiled(what: str) -> Record:
    """By the backend that traces, differentiates and then runs eagerly: generating code would take a minute. What
    communicates between the passes of a step is no graph."""
    model = fully_shard(new_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = FusedAdamS(param_groups(model), lr=LR, **CLIP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if what == "model":
            model.compile(backend="aot_eager")
            return train(model, optimizer)
        step = torch.compile(optimizer.step, backend="aot_eager")
        return train(model, optimizer, step=lambda _: step())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "step"])
def test_compiled_equals_eager(what: str) -> None:
    for record in once_on_ranks(2, compiled, what):
        assert distance(record, expected("clipping")) < 1e-12
