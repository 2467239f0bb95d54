"""torch.distributed.checkpoint: saved on 2 ranks, resumed on 1 and 4, equal to the run that was not interrupted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from swd_fused import FusedAdamS
from swd_fused.outliers import KEY
from tests.distributed import sharded_model
from tests.distributed.ranks import on_ranks
from tests.distributed.sharded_model import LR, STEPS, VARIANTS, Record, distance, new_model, param_groups, train

# `side` has no gradient in step 4. A lagged mean is over those that took the step before, which loaded state does not
# tell, so that run is interrupted where they are the same.
HALF = {"exact": 5, "amsgrad": 5, "lagged": 6, "outliers": 5}
CLIP = {"max_grad_norm": sharded_model.MAX_GRAD_NORM}
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": CLIP,
    "amsgrad": {**CLIP, **VARIANTS},
    "lagged": {"schedule": "lagged"},
    "outliers": {**CLIP, "outliers": "clip"},  # of which there are none in the first 25 steps
}
FORMS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full on rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}
# All forms of the exact run, and of the one that has a tensor in its groups. Forms are torch's: others have one or two.
CASES = [*((name, form) for name in ("exact", "outliers") for form in FORMS), ("amsgrad", "flattened")]
CASES += [("lagged", "sharded"), ("adamw", "sharded"), ("adamw", "full")]


def model_on_all_ranks() -> nn.Module:
    model = new_model()
    return (
        model
        if dist.get_world_size() == 1
        else fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    )


def save(directory: Path) -> dict[str, Any]:
    """All forms of all runs. Returns what is in their state."""
    keys, local_shapes = set(), set()
    for name, options in OPTIONS.items():
        model = model_on_all_ranks()
        optimizer = FusedAdamS(param_groups(model), lr=LR, **options)
        train(model, optimizer, range(HALF[name]))
        for state in optimizer.state_dict()["state"].values():
            keys |= set(state)
            local_shapes |= {value.shape == value.to_local().shape for value in state.values() if value.dim()}
        save_all(directory, name, model, optimizer)
    model = model_on_all_ranks()
    adamw = torch.optim.AdamW([{**group, "weight_decay": 0.3} for group in param_groups(model)], lr=LR)
    train(model, adamw, range(3))
    save_all(directory, "adamw", model, adamw)
    moments = whole_state(adamw, model)
    return {"keys": keys, "is whole": local_shapes, "adamw": moments}


def whole_state(optimizer: Any, model: nn.Module) -> list[dict[str, torch.Tensor]]:
    states = [optimizer.state[param] for param in model.parameters()]
    return [{key: sharded_model.whole(value).clone() for key, value in state.items()} for state in states]


def save_all(directory: Path, name: str, model: nn.Module, optimizer: Any) -> None:
    for form in (form for run, form in CASES if run == name):
        save_one(directory / name / form, model, optimizer, form, FORMS[form])


def save_one(path: Path, model: nn.Module, optimizer: Any, form: str, options: StateDictOptions) -> None:
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if form.startswith("full"):
        if dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
        dist.barrier()
    else:
        dcp.save(state, checkpoint_id=path)


def load_one(path: Path, model: nn.Module, optimizer: Any, form: str, options: StateDictOptions) -> None:
    """As torch asks for, the scheduler's entries in the groups are there before."""
    for group in optimizer.param_groups:
        group["initial_lr"] = LR
    if form == "full on rank 0":
        state = torch.load(path) if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
    elif form == "full":
        state = torch.load(path)
    else:
        before = [param.detach().clone() for param in model.parameters()]
        state = {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),  # takes a step with zeros
        }
        assert all(map(torch.equal, map(local, model.parameters()), map(local, before)))
        moments = [(key, value) for state in optimizer.state.values() for key, value in state.items() if "avg" in key]
        assert all("codes" in key or not local(value).any() for key, value in moments)
        dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def resume(directory: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, form in CASES:
        model = model_on_all_ranks()
        if name in OPTIONS:
            optimizer = FusedAdamS(param_groups(model), lr=0.5, **OPTIONS[name])
            load_one(directory / name / form, model, optimizer, form, FORMS[form])
            answers[f"{name}, {form}"] = train(model, optimizer, range(HALF[name], STEPS))
            answers[f"numbers, {name}, {form}"] = optimizer.param_groups[0].get(KEY)
            continue
        optimizer = FusedAdamS(param_groups(model), lr=LR)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adamw = torch.optim.AdamW(param_groups(model))
            load_one(directory / "adamw" / form, model, adamw, form, FORMS[form])
            optimizer.load_state_dict(adamw.state_dict())
        moments = whole_state(optimizer, model)
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        answers[f"adamw, {form}"] = moments, decays, [str(warning.message) for warning in caught]
        train(model, optimizer, range(3, 5))
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return directory, on_ranks(2, save, directory)


@pytest.fixture(scope="module", params=[1, 4])
def resumed(request: pytest.FixtureRequest, saved: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return on_ranks(request.param, resume, saved[0])


def uninterrupted(name: str) -> Record:
    if name == "lagged":
        return sharded_model.defined(None, lagged=True)
    return sharded_model.defined(**(VARIANTS if name == "amsgrad" else {}))


@pytest.mark.parametrize(("name", "form"), [case for case in CASES if case[0] in OPTIONS])
def test_resumed_equals_uninterrupted(resumed: list[dict[str, Any]], name: str, form: str) -> None:
    reference = uninterrupted(name)
    for answers in resumed:
        record = answers[f"{name}, {form}"]
        assert distance(record, reference) < 1e-12
        torch.testing.assert_close(record.means, reference.means[HALF[name] : STEPS], rtol=1e-10, atol=0)
        numbers = answers[f"numbers, {name}, {form}"]
        if name == "outliers":
            mean = sum(reference.grad_norms) / STEPS
            variance = sum((norm - mean) ** 2 for norm in reference.grad_norms) / STEPS
            assert numbers.tolist() == pytest.approx([mean, variance, STEPS, 0, 0, STEPS], rel=1e-9)
            assert torch.equal(numbers, resumed[0][f"numbers, {name}, {form}"])


@pytest.mark.parametrize("form", [form for name, form in CASES if name == "adamw"])
def test_adamws_distributed_checkpoints_load(
    resumed: list[dict[str, Any]], saved: tuple[Path, list[dict[str, Any]]], form: str
) -> None:
    """By way of an AdamW, since torch's loaders insist on the entries in the groups of whoever saved."""
    for answers in resumed:
        moments, decays, messages = answers[f"adamw, {form}"]
        assert decays == [group["weight_decay"] for group in sharded_model.GROUPS]
        assert any("for decay='decoupled'" in message for message in messages)
        for own, adamw in zip(moments, saved[1][0]["adamw"], strict=True):
            assert all(torch.equal(own[key], adamw[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_state_is_whole_and_has_no_sum_of_a_rank(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    for answers in saved[1]:
        assert answers["keys"] == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert answers["is whole"] == {False}
