"""Codes, random bits, masters and averages of shards are those of the whole tensor, however it is cut, and cut anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from swd_fused import FusedAdamS
from swd_fused.state.rounding import element_numbers
from tests.distributed.ranks import on_ranks, once_on_ranks
from tests.distributed.sharded_model import whole
from tests.distributed.test_sharded_checkpoints import FORMS, load_one, save_one
from tests.runs import random_grads

RANKS, STEPS = 4, 4

# Of the first model: cut unevenly; by FSDP and tensor parallelism along one dimension; along two. Of the rest: with
# nothing for some ranks; along the second of three dimensions; and twice where blocks would be cut, which is float32.
SHAPES = [(13, 320), (13,), (512, 20), (512,), (24, 512), (24,), (1, 5000), (6, 16, 64), (16, 300), (6, 10, 80)]
IS_CODED = [len(shape) > 1 for shape in SHAPES[:8]] + [False, False]

# Without the mean all is the same to the bit: sums over ranks have other last bits than those of one process.
DECOUPLED: dict[str, Any] = {"lr": 1e-2, "decay": "decoupled", "weight_decay": 0.1}
CODED: dict[str, Any] = {"lr": 1e-2, "state_dtype": "8bit", "seed": 5}
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "8 bits": (torch.float32, {**CODED, **DECOUPLED}),
    "8 bits, exact": (torch.float32, {**CODED, "max_grad_norm": 1.0}),
    "8 bits, lagged": (torch.float32, {**CODED, "schedule": "lagged"}),
    "rounding": (torch.bfloat16, {**DECOUPLED, "stochastic_rounding": True, "seed": 9}),
    "masters": (torch.bfloat16, {**DECOUPLED, "master_weights": True}),
    "averages": (torch.float32, {**DECOUPLED, "ema_decay": 0.9}),
}
TO_THE_BIT = [name for name, (_, options) in KINDS.items() if "decay" in options]


# Where the backends have code of their own; the rest is the same for both.
CASES = [(kind, "cpu") for kind in KINDS] + [(kind, "torch") for kind in ("8 bits", "rounding")]


def new_params(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def set_grads(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        is_cut = hasattr(param, "placements")
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_cut else grad.clone()


def contents(params: list[nn.Parameter], optimizer: FusedAdamS) -> list[dict[str, np.ndarray]]:
    """Returns what each whole parameter and its state hold. gloo cannot gather remainders, which masters show."""
    tensors = [{"param": param, "master": optimizer.master_param(param), **optimizer.state[param]} for param in params]
    wide = [{k: whole(value).clone() for k, value in own.items() if value.dtype != torch.int16} for own in tensors]
    return [{k: (v.float() if v.dtype == torch.bfloat16 else v).numpy() for k, v in own.items()} for own in wide]


def trained(params: list[nn.Parameter], kind: str, backend: str) -> tuple[list[dict[str, np.ndarray]], float]:
    dtype, options = KINDS[kind]
    torch.manual_seed(1)
    optimizer = FusedAdamS(params, backend=backend, **options)
    for grads in random_grads(SHAPES, STEPS, dtype):
        set_grads(params, grads)
        optimizer.step()
    return contents(params, optimizer), float(optimizer.exp_avg_sq_mean)


def cut_params(dtype: torch.dtype) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = new_params(dtype)
    model = nn.Sequential(nn.Linear(320, 13), nn.Linear(20, 512), nn.Linear(512, 24)).to(dtype)
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=False):
            param.copy_(value)
    parallelize_module(model[1], mesh["tp"], ColwiseParallel())
    parallelize_module(model[2], mesh["tp"], RowwiseParallel())
    fully_shard(model[0], mesh=init_device_mesh("cpu", (RANKS,)))
    fully_shard(model[1:], mesh=mesh["dp"])
    places = [[Shard(0), Replicate()], [Replicate(), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Shard(2)]]
    others = [distribute_tensor(value.detach(), mesh, place) for value, place in zip(values[6:], places, strict=True)]
    return [*model.parameters(), *map(nn.Parameter, others)]


def sharded() -> dict[str, Any]:
    results: dict[str, Any] = {
        f"{kind} on {backend}": trained(cut_params(KINDS[kind][0]), kind, backend) for kind, backend in CASES
    }
    results["placements"] = [str(param.placements) for param in cut_params(torch.float32)]  # type: ignore[attr-defined]
    results["first number of a plain shard"] = element_numbers(torch.zeros(5, 4), (dist.group.WORLD,)).first
    return results


@pytest.mark.parametrize(("kind", "on"), CASES)
def test_shards_have_what_the_whole_has(kind: str, on: str) -> None:
    answers = once_on_ranks(RANKS, sharded)
    assert any("_StridedShard" in placements for placements in answers[0]["placements"])
    alone, mean = trained(new_params(KINDS[kind][0]), kind, on)
    for found_of_all, found_mean in (answer[f"{kind} on {on}"] for answer in answers):
        assert found_mean == pytest.approx(mean, rel=1e-4, nan_ok=True)
        for i, (found, wanted) in enumerate(zip(found_of_all, alone, strict=True)):
            assert ("exp_avg_codes" in found) == (IS_CODED[i] and "8 bits" in kind)
            if kind in TO_THE_BIT and found.keys() == wanted.keys():
                assert all(np.array_equal(found[key], wanted[key]) for key in wanted), SHAPES[i]
            elif "exp_avg_codes" in found:
                for key in (key for key in found if key.endswith("codes")):
                    assert np.count_nonzero(found[key] != wanted[key]) <= 2e-4 * wanted[key].size, (SHAPES[i], key)
                assert np.allclose(found["param"], wanted["param"], rtol=1e-5, atol=1e-5)


def test_plain_shards_are_numbered_apart() -> None:
    """Nobody knows which part of what they are; but no two ranks draw the same bits."""
    firsts = [answer["first number of a plain shard"] for answer in once_on_ranks(RANKS, sharded)]
    assert firsts == [rank * 2**40 for rank in range(RANKS)]


# --- Saved on 2 ranks, resumed on 1 and 4

MODEL_SHAPES = [(13, 320), (13,), (20, 512), (20,)]
HALF = 3
RESUMED = ["8 bits", "masters", "averages"]


def new_run(kind: str) -> tuple[nn.Module, FusedAdamS]:
    torch.manual_seed(0)
    dtype, options = KINDS[kind]
    model = nn.Sequential(nn.Linear(320, 13), nn.Linear(512, 20)).to(dtype)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model, FusedAdamS(model.parameters(), **options)


def run_steps(model: nn.Module, optimizer: FusedAdamS, steps: range) -> list[dict[str, np.ndarray]]:
    torch.manual_seed(1)
    params = list(model.parameters())
    for t, grads in enumerate(random_grads(MODEL_SHAPES, 2 * HALF, params[0].dtype)):
        if t in steps:
            set_grads(params, grads)
            optimizer.step()
    return contents(params, optimizer)


def forms_of(kind: str) -> dict[str, Any]:
    """Returns the forms of a checkpoint in which codes and scales may differ, of other kinds one."""
    forms = ("sharded", "flattened", "full on rank 0") if kind == "8 bits" else ("sharded",)
    return {form: FORMS[form] for form in forms}


def save(directory: Path) -> None:
    for kind in RESUMED:
        model, optimizer = new_run(kind)
        run_steps(model, optimizer, range(HALF))
        for group in optimizer.param_groups:
            group["initial_lr"] = 1e-2
        for form, options in forms_of(kind).items():
            save_one(directory / kind / form, model, optimizer, form, options)


def resume(directory: Path) -> dict[str, Any]:
    answers = {}
    for kind in RESUMED:
        for form, options in forms_of(kind).items():
            model, optimizer = new_run(kind)
            load_one(directory / kind / form, model, optimizer, form, options)
            answers[f"{kind}, {form}"] = run_steps(model, optimizer, range(HALF, 2 * HALF))
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    on_ranks(2, save, directory)
    return directory


@pytest.mark.parametrize("ranks", [1, 4])
def test_resumed_on_other_ranks_to_the_bit(saved: Path, ranks: int) -> None:
    uninterrupted = {kind: run_steps(*new_run(kind), range(2 * HALF)) for kind in RESUMED}
    for answers in on_ranks(ranks, resume, saved):
        for case, found_of_all in answers.items():
            for found, wanted in zip(found_of_all, uninterrupted[case.rpartition(",")[0]], strict=True):
                assert found.keys() == wanted.keys()
                assert all(np.array_equal(found[key], wanted[key]) for key in wanted), case


# --- Sharded anew in ways that cut blocks

CUT = {
    "a vector": ((70_000,), Replicate(), Shard(0)),
    "columns": ((64, 768), Shard(0), Shard(1)),
    "a third dimension": ((16, 4, 128, 3), Shard(0), Shard(2)),
    "no rows": ((1, 5000), Shard(0), Replicate()),
}


def sharded_anew() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    errors = {}
    for name, (shape, old, new) in CUT.items():
        torch.manual_seed(0)
        value, grad = torch.randn(2, *shape)
        optimizers = []
        for placement in (old, new):
            param = nn.Parameter(distribute_tensor(value, mesh, [placement]))
            optimizers.append(FusedAdamS([param], state_dtype="8bit", schedule="lagged"))
            set_grads([param], [grad])
        saving, loading = optimizers
        saving.step()
        loading.load_state_dict(saving.state_dict())
        (param,), (other,) = saving.numbered_params(), loading.numbered_params()
        with torch.no_grad():
            other.copy_(distribute_tensor(whole(param), mesh, [new]))
        means = []
        for optimizer in optimizers:
            optimizer.step()
            means.append(float(optimizer.exp_avg_sq_mean))
        errors[name] = {
            "mean": abs(means[0] / means[1] - 1),
            "params": float((whole(param) - whole(other)).abs().max()),
            "is coded": "exp_avg_codes" in loading.state[other],
        }
    return errors


def test_codes_that_are_cut_become_numbers() -> None:
    """In the first step after it, from the same moments. Scales cannot follow half a block."""
    for answer in on_ranks(2, sharded_anew):
        for name, found in answer.items():
            assert found["is coded"] == (name == "no rows")
            assert found["mean"] < 1e-6, name
            assert found["params"] < 1e-6, name
