"""Moments in 8 bits of shards: the codes of the whole tensor, however it is cut, also after it is cut anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from swd_fused import FusedAdamS
from tests.distributed.ranks import on_ranks, once_on_ranks
from tests.distributed.sharded_model import whole
from tests.distributed.test_sharded_checkpoints import load_one, save_one
from tests.runs import random_grads

RANKS, STEPS = 4, 4
BACKENDS = ["torch", "cpu"]  # the ranks are on the CPU, wherever other tests run

# Of the first model: cut unevenly; by FSDP and tensor parallelism along one dimension; along two. Of the rest: with
# nothing for some ranks; along the second of three dimensions; and twice where blocks would be cut, which is float32.
SHAPES = [(13, 320), (13,), (512, 20), (512,), (24, 512), (24,), (1, 5000), (6, 16, 64), (16, 300), (6, 10, 80)]
IS_CODED = [len(shape) > 1 for shape in SHAPES[:8]] + [False, False]

# Without the mean codes are the same to the bit: sums over ranks have other last bits than those of one process.
OPTIONS: dict[str, dict[str, Any]] = {
    "decoupled": {"decay": "decoupled", "weight_decay": 0.1},
    "exact": {"max_grad_norm": 1.0},
    "lagged": {"schedule": "lagged"},
}


def new_params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def set_grads(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        is_cut = hasattr(param, "placements")
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_cut else grad.clone()


def trained(params: list[nn.Parameter], options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    optimizer = FusedAdamS(params, lr=1e-2, state_dtype="8bit", seed=5, **options)
    for grads in random_grads(SHAPES, STEPS):
        set_grads(params, grads)
        optimizer.step()
    states = [{key: whole(value).clone().numpy() for key, value in optimizer.state[p].items()} for p in params]
    return {"params": [whole(p).clone().numpy() for p in params], "states": states, "mean": optimizer.exp_avg_sq_mean}


def sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (RANKS,))
    results: dict[str, Any] = {}
    for backend in BACKENDS:
        for name, options in OPTIONS.items():
            values = new_params()
            model = nn.Sequential(nn.Linear(320, 13), nn.Linear(20, 512), nn.Linear(512, 24))
            with torch.no_grad():
                for param, value in zip(model.parameters(), values, strict=False):
                    param.copy_(value)
            parallelize_module(model[1], mesh["tp"], ColwiseParallel())
            parallelize_module(model[2], mesh["tp"], RowwiseParallel())
            fully_shard(model[0], mesh=line)
            fully_shard(model[1:], mesh=mesh["dp"])
            places = [[Shard(0), Replicate()], [Replicate(), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Shard(2)]]
            others = [
                nn.Parameter(distribute_tensor(value.detach(), mesh, placements))
                for value, placements in zip(values[6:], places, strict=True)
            ]
            params = [*model.parameters(), *others]
            results[f"{name} on {backend}"] = trained(params, {**options, "backend": backend})
            results["placements"] = [str(param.placements) for param in params]
    return results


@pytest.mark.parametrize("on", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_shards_have_the_codes_of_the_whole(on: str, name: str) -> None:
    answers = once_on_ranks(RANKS, sharded)
    assert any("_StridedShard" in placements for placements in answers[0]["placements"])
    alone = trained(new_params(), {**OPTIONS[name], "backend": on})
    for answer in (answer[f"{name} on {on}"] for answer in answers):
        assert float(answer["mean"]) == pytest.approx(float(alone["mean"]), rel=1e-4, nan_ok=True)
        for i, (found, wanted) in enumerate(zip(answer["states"], alone["states"], strict=True)):
            assert ("exp_avg_codes" in found) == IS_CODED[i]
            for key in (key for key in found if key.endswith("codes") and "exp_avg_codes" in found):
                differing = np.count_nonzero(found[key] != wanted[key])
                assert differing <= (0 if name == "decoupled" else 2e-4 * wanted[key].size), (SHAPES[i], key)
            if IS_CODED[i]:
                assert np.allclose(answer["params"][i], alone["params"][i], rtol=1e-5, atol=1e-5)


# --- Saved on 2 ranks, resumed on 1, 2 and 4

FORMS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full on rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}
MODEL_SHAPES = [(13, 320), (13,), (20, 512), (20,)]
HALF = 3


def model_on_all_ranks() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(320, 13), nn.Linear(512, 20))
    size = dist.get_world_size() if dist.is_initialized() else 1
    return model if size == 1 else fully_shard(model, mesh=init_device_mesh("cpu", (size,)))


def run_steps(model: nn.Module, optimizer: FusedAdamS, steps: range) -> None:
    torch.manual_seed(1)
    for t, grads in enumerate(random_grads(MODEL_SHAPES, 2 * HALF)):
        if t in steps:
            set_grads(list(model.parameters()), grads)
            optimizer.step()


def new_optimizer(model: nn.Module) -> FusedAdamS:
    return FusedAdamS(model.parameters(), lr=1e-2, state_dtype="8bit", **OPTIONS["decoupled"])


def contents(model: nn.Module, optimizer: FusedAdamS) -> list[dict[str, Any]]:
    return [
        {
            "param": whole(param).clone().numpy(),
            **{k: whole(v).clone().numpy() for k, v in optimizer.state[param].items()},
        }
        for param in model.parameters()
    ]


def save(directory: Path) -> None:
    model = model_on_all_ranks()
    optimizer = new_optimizer(model)
    run_steps(model, optimizer, range(HALF))
    for group in optimizer.param_groups:
        group["initial_lr"] = 1e-2
    for form, options in FORMS.items():
        save_one(directory / form, model, optimizer, form, options)


def resume(directory: Path) -> dict[str, Any]:
    answers = {}
    for form, options in FORMS.items():
        model = model_on_all_ranks()
        optimizer = new_optimizer(model)
        load_one(directory / form, model, optimizer, form, options)
        run_steps(model, optimizer, range(HALF, 2 * HALF))
        answers[form] = contents(model, optimizer)
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    on_ranks(2, save, directory)
    return directory


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resumed_on_other_ranks_to_the_bit(saved: Path, ranks: int) -> None:
    model = model_on_all_ranks()
    optimizer = new_optimizer(model)
    run_steps(model, optimizer, range(2 * HALF))
    uninterrupted = contents(model, optimizer)
    for answers in on_ranks(ranks, resume, saved):
        for form in FORMS:
            for found, wanted in zip(answers[form], uninterrupted, strict=True):
                assert found.keys() == wanted.keys()
                assert all(np.array_equal(found[key], wanted[key]) for key in wanted), form


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
