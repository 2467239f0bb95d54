"""What others do to the state of DTensors between steps, which the next mean must follow. torch counts writes on the
DTensor or on its local part, and both must be noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from swd_fused import FusedAdamS
from tests.distributed.ranks import once_on_ranks
from tests.distributed.sharded_model import whole

Write = Callable[[torch.nn.Module, FusedAdamS], None]
VALUE = 3.0


def filled(model: torch.nn.Module, _: FusedAdamS) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(VALUE)


def copied(model: torch.nn.Module, _: FusedAdamS) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.full_like(param, VALUE))


def filled_locally(model: torch.nn.Module, _: FusedAdamS) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(VALUE)


def loaded_sharded(model: torch.nn.Module, _: FusedAdamS) -> None:
    model.load_state_dict({key: torch.full_like(value, VALUE) for key, value in model.state_dict().items()})


def loaded_full(model: torch.nn.Module, _: FusedAdamS) -> None:
    state = {key: torch.full(value.shape, VALUE, dtype=value.dtype) for key, value in model.state_dict().items()}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


WRITES_TO_PARAMS: list[Write] = [filled, copied, filled_locally, loaded_sharded, loaded_full]


def new_run(dtype: torch.dtype, **options: Any) -> tuple[torch.nn.Module, FusedAdamS]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, FusedAdamS(model.parameters(), lr=0.125, **options)


def take_step(model: torch.nn.Module, optimizer: FusedAdamS, scale: float = 1) -> None:
    for number, param in enumerate(model.parameters()):
        values = scale * torch.linspace(-1, 2, param.numel(), dtype=param.dtype).reshape(param.shape) / (number + 1)
        param.grad = distribute_tensor(values, param.device_mesh, param.placements)
    optimizer.step()


def masters_after(write: Write, dtype: torch.dtype) -> bool:
    """Whether a step goes on from what was written, as a run does that starts there with the same moments, and with
    what masters have beyond bfloat16, but without float32 masters."""
    model, optimizer = new_run(dtype, master_weights=True)
    for _ in range(2):
        take_step(model, optimizer)
    write(model, optimizer)
    for param in model.parameters():
        assert bool((whole(param) == VALUE).all()), "the write itself"
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values.pop("master_param", None)
    other_model, other = new_run(dtype, master_weights=True)
    filled(other_model, other)
    other.load_state_dict(state)
    take_step(model, optimizer)
    take_step(other_model, other)
    pairs = zip(model.parameters(), other_model.parameters(), strict=True)
    return all(torch.equal(whole(mine), whole(its)) for mine, its in pairs)


def continues_as_loaded(model: torch.nn.Module, optimizer: FusedAdamS, **options: Any) -> bool:
    """Whether the next step has the mean of an optimizer that has loaded this one's state."""
    other_model, other = new_run(torch.float32, **options)
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other_model.parameters(), strict=True):
            its.copy_(mine)
    other.load_state_dict(optimizer.state_dict())
    take_step(model, optimizer)
    take_step(other_model, other)
    return torch.equal(optimizer.exp_avg_sq_mean, other.exp_avg_sq_mean)


def mean_after_a_write(schedule: str, key: str, locally: bool) -> bool:
    """Whether the next mean is that of the state as it was written, which is what loading it anew gives."""
    options = {"schedule": schedule, "amsgrad": key == "max_exp_avg_sq"}
    model, optimizer = new_run(torch.float32, **options)
    for _ in range(2):
        take_step(model, optimizer)
    for param in model.parameters():
        moment = optimizer.state[param][key]
        (moment.to_local() if locally else moment).mul_(100)
    before = float(optimizer.exp_avg_sq_mean)
    is_that_of_the_state = continues_as_loaded(model, optimizer, **options)
    assert float(optimizer.exp_avg_sq_mean) > 10 * before, "the write makes a difference"
    return is_that_of_the_state


def mean_after_a_switch(schedule: str, switches: int) -> bool:
    """Whether the next mean is that of the state after `amsgrad` was switched, off and perhaps on again, where the
    maxima are far above the second moments."""
    model, optimizer = new_run(torch.float32, schedule=schedule, amsgrad=True, betas=(0.9, 0.5))
    take_step(model, optimizer, scale=100)
    for number in range(switches):
        for _ in range(6):
            take_step(model, optimizer)
        optimizer.param_groups[0]["amsgrad"] = bool(number % 2)
    return continues_as_loaded(model, optimizer, schedule=schedule, betas=(0.9, 0.5))


def mean_after_a_replacement(schedule: str) -> bool:
    """Whether the next mean is that of the second moments that were put in place of others."""
    model, optimizer = new_run(torch.float32, schedule=schedule)
    for _ in range(2):
        take_step(model, optimizer)
    before = float(optimizer.exp_avg_sq_mean)
    for param in model.parameters():
        optimizer.state[param]["exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"] * 100
    is_that_of_the_state = continues_as_loaded(model, optimizer, schedule=schedule)
    assert float(optimizer.exp_avg_sq_mean) > 10 * before, "the replacement makes a difference"
    return is_that_of_the_state


def mean_after_a_rollback(schedule: str) -> bool:
    """Whether the next mean is that of state which was saved some steps before, and loaded into the optimizer that has
    taken them."""
    model, optimizer = new_run(torch.float32, schedule=schedule)
    take_step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        take_step(model, optimizer, scale=100)
    optimizer.load_state_dict(saved)
    return continues_as_loaded(model, optimizer, schedule=schedule)


SCHEDULES = ["exact", "lagged"]
CASES: list[tuple[Any, ...]] = [
    *((masters_after, write, dtype) for write in WRITES_TO_PARAMS for dtype in (torch.bfloat16, torch.float16)),
    *(
        (mean_after_a_write, schedule, key, locally)
        for schedule in SCHEDULES
        for key in ("exp_avg_sq", "max_exp_avg_sq")
        for locally in (False, True)
    ),
    *((mean_after_a_switch, schedule, switches) for schedule in SCHEDULES for switches in (1, 2)),
    *((mean, schedule) for mean in (mean_after_a_replacement, mean_after_a_rollback) for schedule in SCHEDULES),
]


def run_cases() -> list[bool]:
    return [function(*arguments) for function, *arguments in CASES]


NAMES = [" ".join(getattr(part, "__name__", str(part)) for part in case) for case in CASES]


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_the_next_step_goes_on_from_what_was_written(number: int) -> None:
    assert [answers[number] for answers in once_on_ranks(2, run_cases)] == [True, True]
