"""Parameters sharded in any way: mixed meshes, partial gradients, ranks without any gradient, process groups."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import swd_fused
from swd_fused import FusedAdamS, metrics
from swd_fused.core import sources
from swd_fused.core import step as step_module
from swd_fused.decay.observers import DecayWarning
from tests.core.test_param_groups import Model, names
from tests.distributed import sharded_model
from tests.distributed.ranks import counted_all_reduces, once_on_ranks
from tests.distributed.sharded_model import LR, MAX_GRAD_NORM, Record, distance, new_model, param_groups, train, whole
from tests.runs import defined, random_grads, random_params

SHAPES = [(5, 7), (3, 5), (9,), (4, 4), (6, 2), (11,), (2, 3, 5), (8,), (1,), (10, 3)]
STEPS = 10
GROUPS = [
    {"params": range(5), "lr": 1e-2, "weight_decay": 2e-3, "betas": (0.9, 0.99)},
    {"params": range(5, len(SHAPES)), "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95)},
]


def whole_tensors(steps: int = STEPS) -> tuple[list[torch.nn.Parameter], list[list[Tensor | None]]]:
    """The same on all ranks. Some gradients come and go."""
    torch.manual_seed(0)
    params = random_params(SHAPES, torch.float64)
    grads: list[list[Any]] = random_grads(SHAPES, steps, torch.float64)
    for t, step_grads in enumerate(grads):
        for i in range(len(SHAPES)):
            if (t + i) % 4 == 0:
                step_grads[i] = None
    return params, grads


def layouts() -> list[tuple[DeviceMesh, list[Any]] | None]:
    """Of each of SHAPES. None is a plain tensor, which is replicated."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("x", "one", "y"))
    return [
        (grid, [Shard(0), Shard(1)]),
        (grid, [Shard(0), Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (line, [Shard(1)]),
        None,
        (line, [Shard(0)]),
        (cube, [Shard(1), Shard(2), Shard(0)]),
        (grid["b"], [Shard(0)]),
        (line, [Shard(0)]),
        (grid, [Replicate(), Replicate()]),
    ]


def cut(tensor: Tensor, layout: tuple[DeviceMesh, list[Any]] | None) -> Tensor:
    return tensor if layout is None else distribute_tensor(tensor.detach(), *layout)


def as_partial(grad: Tensor, mesh: DeviceMesh) -> Tensor:
    """A gradient whose parts are still to be added up, as sequence parallel layers leave them."""
    return DTensor.from_local(grad / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)


def mixed_meshes(**options: Any) -> dict[str, Any]:
    params, grads = whole_tensors()
    places = layouts()
    cut_params = [torch.nn.Parameter(cut(param, layout)) for param, layout in zip(params, places, strict=True)]
    groups = [{**group, "params": [cut_params[i] for i in group["params"]]} for group in GROUPS]
    optimizer = FusedAdamS(groups, max_grad_norm=1.0, **options)
    means = []
    for step_grads in grads:
        for i, (param, grad, layout) in enumerate(zip(cut_params, step_grads, places, strict=True)):
            if grad is None:
                param.grad = None
            elif layout is not None and i % 3 == 0:
                param.grad = as_partial(grad, layout[0])
            else:
                param.grad = cut(grad, layout)
        optimizer.step()
        means.append(float(optimizer.exp_avg_sq_mean))
    return {"params": [whole(param).numpy() for param in cut_params], "means": means}


def plain_shards(mine: Callable[[int], bool], **options: Any) -> dict[str, Any]:
    """Whole tensors, some on each rank. In the fifth step all gradients of rank 0 are None."""
    params, grads = whole_tensors()
    own = [i for i in range(len(SHAPES)) if mine(i)]
    groups = [{**group, "params": [params[i] for i in group["params"] if i in own]} for group in GROUPS]
    optimizer = FusedAdamS(groups, max_grad_norm=1.0, process_group=dist.group.WORLD, **options)
    means = []
    for t, step_grads in enumerate(grads):
        for i in own:
            param, grad = params[i], step_grads[i]
            param.grad = None if t == 4 and not i % dist.get_world_size() else grad
        optimizer.step()
        means.append(float(optimizer.exp_avg_sq_mean))
    return {"params": {i: params[i].detach().numpy() for i in own}, "means": means}


def spread_over_ranks(**options: Any) -> dict[str, Any]:
    return plain_shards(lambda i: i % dist.get_world_size() == dist.get_rank(), **options)


def all_on_the_last_rank(**options: Any) -> dict[str, Any]:
    """The others have an optimizer without any parameter."""
    return plain_shards(lambda i: dist.get_rank() == dist.get_world_size() - 1, **options)


def a_replicated_group() -> dict[str, Any]:
    """The first group is whole on each rank, and says so; the second is spread."""
    params, grads = whole_tensors()
    own = [i for i in GROUPS[1]["params"] if i % dist.get_world_size() == dist.get_rank()]
    first = {**GROUPS[0], "params": [params[i] for i in GROUPS[0]["params"]], "process_group": None}
    second = {**GROUPS[1], "params": [params[i] for i in own], "process_group": dist.group.WORLD}
    optimizer = FusedAdamS([first, second], max_grad_norm=1.0)
    assert all("process_group" not in group for group in optimizer.state_dict()["param_groups"])
    optimizer = copy.deepcopy(optimizer)
    copies = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [*GROUPS[0]["params"], *own]
    for t, step_grads in enumerate(grads):
        for i, param in zip(indices, copies, strict=True):
            param.grad = None if t == 4 and not i % dist.get_world_size() else step_grads[i]
        optimizer.step()
    return {"params": {i: p.detach().numpy() for i, p in zip(indices, copies, strict=True)}}


def pipeline_stages() -> dict[str, Any]:
    """Two stages that are sharded in different ways, each over its own two ranks, and summed over the pipeline."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    stage = mesh.get_local_rank("stage")
    params, grads = whole_tensors()
    own = [i for i in range(len(SHAPES)) if i % 2 == stage]
    placements = {i: [Shard(0)] if stage == 0 or i % 4 == 1 else [Replicate()] for i in own}
    cut_params = {i: torch.nn.Parameter(distribute_tensor(params[i].detach(), mesh["dp"], placements[i])) for i in own}
    groups = [{**group, "params": [cut_params[i] for i in group["params"] if i in own]} for group in GROUPS]
    optimizer = FusedAdamS(groups, max_grad_norm=1.0, process_group=mesh.get_group("stage"))
    for t, step_grads in enumerate(grads):
        for i in own:
            grad = None if t == 4 and not i % 4 else step_grads[i]
            cut_params[i].grad = None if grad is None else distribute_tensor(grad, mesh["dp"], placements[i])
        optimizer.step()
    return {"params": {i: whole(param).numpy() for i, param in cut_params.items()}}


def zero_redundancy_optimizer(*args: Any, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit.script is deprecated

    return ZeroRedundancyOptimizer(*args, **options)


def zero_redundancy() -> Record:
    model = new_model()
    inner = functools.partial(FusedAdamS, process_group=dist.group.WORLD, max_grad_norm=MAX_GRAD_NORM)
    optimizer = zero_redundancy_optimizer(param_groups(model), inner, lr=LR)
    return train(model, optimizer)


def fsdp1(use_orig_params: bool, **options: Any) -> Record:
    """Flat parameters are padded, so without the number of elements the mean is a little too small."""
    model = new_model()
    numel = sum(param.numel() for param in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        model = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        total_numel = None if use_orig_params else numel
        sharded = {"process_group": dist.group.WORLD, "total_numel": total_numel, **options}
        optimizer = FusedAdamS(model.parameters(), lr=LR, weight_decay=5e-3, max_grad_norm=MAX_GRAD_NORM, **sharded)
        record = Record()
        for t in range(STEPS):
            optimizer.zero_grad()
            sharded_model.loss_of(model, 3 * t).backward()
            optimizer.step()
            record.means.append(float(optimizer.exp_avg_sq_mean))
        with FullyShardedDataParallel.summon_full_params(model):
            return record.finish(model)


def lagged_over_a_step_without_any_gradient() -> list[list[float]]:
    """Means of all other steps. Single, then spread."""
    means: list[list[float]] = []
    for own, group in [(range(4), None), (range(dist.get_rank(), 4, dist.get_world_size()), dist.group.WORLD)]:
        torch.manual_seed(0)
        params, grads = random_params([(5,)] * 4, torch.float64), random_grads([(5,)] * 4, 6, torch.float64)
        optimizer = FusedAdamS([params[i] for i in own], schedule="lagged", process_group=group)
        means.append([])
        for t, step_grads in enumerate(grads):
            for param, grad in zip(params, step_grads, strict=True):
                param.grad = None if t in (2, 3) else grad
            optimizer.step()
            if t not in (2, 3):
                means[-1].append(float(optimizer.exp_avg_sq_mean))
    return means


def shards_that_move() -> list[bool]:
    """FSDP gives a DTensor other memory, when a model is moved for one. The step must follow."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)]))
    optimizer = FusedAdamS([param])
    moved = []
    for _ in range(3):
        param._local_tensor = param._local_tensor.clone()
        before = param._local_tensor.clone()
        param.grad = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
        optimizer.step()
        moved.append(not torch.equal(param._local_tensor, before))
    return moved


def state_with_other_placements() -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
    optimizer = FusedAdamS([param])
    param.grad = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    optimizer.step()
    saved = optimizer.state_dict()
    values = torch.arange(15.0).reshape(5, 3)
    saved["state"][0]["exp_avg"] = distribute_tensor(values, mesh, [Replicate()])
    saved["state"][0]["exp_avg_sq"] = distribute_tensor(values, mesh, [Shard(1)])
    optimizer.load_state_dict(saved)
    optimizer.step()
    return whole(optimizer.state[param]["exp_avg"])


class ReadsByTheHost(TorchDispatchMode):
    """On a GPU each of these would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def reads_by_the_host() -> dict[str, set[str]]:
    """In a second step, with the operations that a GPU would get."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    answers = {}
    for name, options, given in [
        ("exact", {"max_grad_norm": 1.0}, {}),
        ("amsgrad", {"amsgrad": True}, {}),
        ("lagged", {"schedule": "lagged"}, {}),
        ("given", {}, {"grad_sumsq": torch.tensor(3.0)}),
        ("given in parts", {}, {"grad_sumsq": torch.tensor(3.0), "numel": 45}),
    ]:
        params = [torch.nn.Parameter(distribute_tensor(torch.ones(9, 5), mesh, [Shard(0)]))]
        params.append(torch.nn.Parameter(torch.ones(3)))
        optimizer = FusedAdamS(params, backend="torch", **options)
        for _ in range(2):
            for param in params:
                param.grad = param.detach().clone()
            with ReadsByTheHost() as reads, pytest.MonkeyPatch.context() as patch:
                patch.setattr(sources, "can_be_read", lambda value: False)
                patch.setattr(step_module, "Tensor", None)  # so that results do not look like a CPU's
                patch.setattr(metrics, "Tensor", None)
                patch.setattr(DecayWarning, "note", lambda *_: None)  # it has a way of its own for GPUs
                optimizer.step(**given)
        answers[name] = reads.names
    with ReadsByTheHost() as reads:
        float(torch.ones(()))
    answers["float"] = reads.names
    return answers


def clipped_by_torch(with_numel: bool) -> tuple[Record, list[int]]:
    """The norm that `clip_grad_norm_` returns, before it clips, is the one thing that a given sum needs."""
    torch.manual_seed(0)
    model = new_model()
    numels = [param.numel() for param in model.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = FusedAdamS(param_groups(model), lr=LR)
    all_reduces: list[int] = []

    def step(optimizer: FusedAdamS) -> None:
        params = [param for param in model.parameters() if param.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        clipped = norm * (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1)
        with counted_all_reduces(all_reduces):
            optimizer.step(grad_sumsq=clipped**2, numel=sum(numels) if with_numel else None)

    return train(model, optimizer, range(0, 12, 3), step=step), all_reduces


def clips_by_the_norm_of_all() -> tuple[float, float]:
    """Each rank's own norm is below the bound."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdamS([param], max_grad_norm=1.0, process_group=dist.group.WORLD)
    param.grad = torch.full((4,), 0.8 / 2)
    optimizer.step()
    return float(optimizer.grad_norm), optimizer.metrics()["clipped_share"]


def named_groups() -> dict[str, list[str]]:
    return names(swd_fused.param_groups(fully_shard(Model(), mesh=init_device_mesh("cpu", (2,)))))


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "given": functools.partial(clipped_by_torch, False),
        "given with numel": functools.partial(clipped_by_torch, True),
        "clips": clips_by_the_norm_of_all,
        "groups": named_groups,
        "spread": spread_over_ranks,
        "spread, torch": functools.partial(spread_over_ranks, backend="torch"),
        "last": all_on_the_last_rank,
        "replicated": a_replicated_group,
        "zero": zero_redundancy,
        "fsdp1, False": functools.partial(fsdp1, False),
        "fsdp1, True": functools.partial(fsdp1, True),
        "reads": reads_by_the_host,
        "lagged": lagged_over_a_step_without_any_gradient,
        "moving": shards_that_move,
        "placements": state_with_other_placements,
    },
    4: {
        "mixed": mixed_meshes,
        "mixed, torch": functools.partial(mixed_meshes, backend="torch"),
        "mixed, amsgrad": functools.partial(mixed_meshes, amsgrad=True),
        "spread": spread_over_ranks,
        "pipeline": pipeline_stages,
        "zero": zero_redundancy,
        "fsdp1, False": functools.partial(fsdp1, False),
        "fsdp1, True": functools.partial(fsdp1, True),
    },
}


def run_cases(size: int) -> dict[str, Any]:
    return {name: case() for name, case in CASES[size].items()}


def results(size: int) -> list[dict[str, Any]]:
    return once_on_ranks(size, run_cases, size)


@cache
def expected(without: int | None = None, **options: Any) -> list[np.ndarray]:
    """`without`: in the fifth step parameters whose index it divides have no gradient."""
    params, grads = whole_tensors()
    if without is not None:
        grads[4] = [None if i % without == 0 else grad for i, grad in enumerate(grads[4])]
    return defined(params, grads, GROUPS, max_grad_norm=1.0, **options).params


def assert_equal(params: dict[int, np.ndarray], reference: list[np.ndarray]) -> None:
    for i, param in params.items():
        assert np.abs(param - reference[i]).max(initial=0) < 1e-13, i


@pytest.mark.parametrize("case", ["mixed", "mixed, torch", "mixed, amsgrad"])
def test_any_mix_of_meshes_and_placements(case: str) -> None:
    reference = expected(amsgrad=True) if case == "mixed, amsgrad" else expected()
    for answers in results(4):
        assert_equal(dict(enumerate(answers[case]["params"])), reference)
        assert answers[case]["means"] == results(4)[0][case]["means"]


@pytest.mark.parametrize(("size", "case"), [(2, "spread"), (2, "spread, torch"), (4, "spread"), (2, "last")])
def test_plain_tensors_spread_over_a_process_group(size: int, case: str) -> None:
    """One rank has no gradient at all in one step, or no parameter at all, and takes part."""
    for answers in results(size):
        assert_equal(answers[case]["params"], expected(size))
        assert answers[case]["means"] == results(size)[0][case]["means"]


def test_a_replicated_group_beside_spread_ones() -> None:
    for answers in results(2):
        assert_equal(answers["replicated"]["params"], expected(2))


def test_stages_of_a_pipeline_that_are_sharded_differently() -> None:
    for answers in results(4):
        assert_equal(answers["pipeline"]["params"], expected(4))


@pytest.mark.parametrize("size", CASES)
def test_zero_redundancy_optimizer(size: int) -> None:
    for answers in results(size):
        assert distance(answers["zero"], sharded_model.defined()) < 1e-12


@pytest.mark.parametrize("size", CASES)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(size: int, use_orig_params: bool) -> None:
    model = new_model()
    reference = FusedAdamS(model.parameters(), lr=LR, weight_decay=5e-3, max_grad_norm=MAX_GRAD_NORM, backend="torch")
    means = []
    for t in range(STEPS):
        reference.zero_grad()
        sharded_model.loss_of(model, 3 * t).backward()
        reference.step()
        means.append(float(reference.exp_avg_sq_mean))
    record = Record().finish(model)
    for answers in results(size):
        answer = answers[f"fsdp1, {use_orig_params}"]
        torch.testing.assert_close(answer.means, means, rtol=1e-10, atol=0)
        answer.params = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in answer.params.items()}
        assert distance(answer, record) < 1e-12


def test_no_step_makes_the_host_wait_for_a_device() -> None:
    for answers in results(2):
        reads = answers["reads"]
        assert reads.pop("float")  # it would be noticed
        assert not any(reads.values()), reads


def test_lagged_skips_a_step_in_which_no_rank_has_a_gradient() -> None:
    for answers in results(2):
        single, spread = answers["lagged"]
        assert spread == pytest.approx(single, rel=1e-12)


def test_shards_may_move() -> None:
    assert all(answers["moving"] == [True] * 3 for answers in results(2))


def test_state_is_redistributed_as_the_parameter_is() -> None:
    for answers in results(2):
        expected = 0.9 * torch.arange(15.0).reshape(5, 3) + 0.1
        torch.testing.assert_close(answers["placements"], expected)


@pytest.mark.parametrize("case", ["given", "given with numel"])
def test_a_given_sum_on_shards(case: str) -> None:
    """Told how many elements there are, ranks have nothing to ask each other after the first step."""
    reference = sharded_model.defined(steps=range(0, 12, 3))
    for answers in results(2):
        record, all_reduces = answers[case]
        assert distance(record, reference) < 1e-10
        assert all_reduces == ([1, 0, 0, 0] if case == "given with numel" else [1, 1, 1, 1])


def test_steps_that_clip_are_counted_by_the_norm_of_all() -> None:
    for answers in results(2):
        assert answers["clips"] == (pytest.approx(0.8 * 2**0.5), 1)


def test_param_groups_of_sharded_models() -> None:
    for answers in results(2):
        assert answers["groups"] == names(swd_fused.param_groups(Model()))
