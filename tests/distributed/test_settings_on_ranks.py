"""What is set or fails between two steps, where several ranks share a mean."""

from __future__ import annotations

import copy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from swd_fused import FusedAdamS
from swd_fused.distributed.collective import device_for
from swd_fused.distributed.sharding import ShardedOver
from tests.distributed.ranks import once_on_ranks

SHAPES = [(30,), (4, 5)]


def new_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Other ones on each rank: a pipeline's stages."""
    torch.manual_seed(dist.get_rank())
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def take_step(params: list[nn.Parameter], optimizer: Any, t: int) -> None:
    generator = torch.Generator().manual_seed(10 * t + dist.get_rank())
    for param in params:
        grad = torch.randn(param.shape, generator=generator) / (1 + t)
        param.grad = grad.to(param.dtype)
    optimizer.step()


def message_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- A peer that is gone


def deserted() -> tuple[list[nn.Parameter], FusedAdamS, Any]:
    """Takes a step on both ranks. Then rank 1 is as good as dead: what rank 0 leaves for a third one gets no answer."""
    shared, own = dist.new_group([0, 1]), dist.new_group([0])
    params = new_params()
    optimizer = FusedAdamS(params, schedule="lagged", process_group=shared)
    take_step(params, optimizer, 0)
    saved = copy.deepcopy((optimizer.state_dict(), params))
    if dist.get_rank() == 0:
        _set_pg_timeout(timedelta(seconds=1), shared)  # only now, so that a busy machine may take its time before
        take_step(params, optimizer, 1)
    return params, optimizer, (own, *saved)


def after_a_failed_reduction() -> dict[str, Any]:
    params, optimizer, (own, state_dict, others) = deserted()
    if dist.get_rank() == 1:
        return {}
    answers: dict[str, Any] = {"step": message_of(take_step, params, optimizer, 2)}
    answers["load_state_dict"] = message_of(optimizer.load_state_dict, state_dict)
    with torch.no_grad():
        for param, value in zip(params, others, strict=True):
            param.copy_(value)
    answers["sum_over"] = message_of(optimizer.sum_over, ShardedOver(own))
    answers["alone"] = message_of(take_step, params, optimizer, 3)
    expected = FusedAdamS(others, schedule="lagged", process_group=own)
    expected.load_state_dict(state_dict)
    take_step(others, expected, 3)
    answers["equal"] = all(map(torch.equal, params, others))
    return answers


def dropped_after_failures() -> dict[str, str]:
    answers = {}
    for how in ("load_state_dict", "sum_over", "schedule"):
        params, optimizer, (own, state_dict, _) = deserted()
        if dist.get_rank() == 0:
            if how == "load_state_dict":
                answers[how] = message_of(optimizer.load_state_dict, state_dict)
            elif how == "schedule":
                answers[how] = message_of(setattr, optimizer, "schedule", "exact")
            answers[f"{how}, sum_over"] = message_of(optimizer.sum_over, ShardedOver(own))
            answers[f"{how}, alone"] = message_of(take_step, params, optimizer, 2)
    return answers


def failures() -> tuple[dict[str, Any], dict[str, str]]:
    return after_a_failed_reduction(), dropped_after_failures()


def test_a_failed_reduction_is_told_once() -> None:
    (answers, _), _ = once_on_ranks(2, failures)
    assert answers["step"], "the peer is gone"
    assert (answers["load_state_dict"], answers["sum_over"], answers["alone"]) == ("", "", "")
    assert answers["equal"]


def test_a_failed_reduction_that_is_dropped_is_nobodys_concern() -> None:
    (_, answers), _ = once_on_ranks(2, failures)
    assert len(answers) == 8
    assert set(answers.values()) == {""}, answers


# --- Settings


def there_and_back() -> list[float]:
    """The sums that a lagged step has left are too old after steps of another kind. Loading the state drops them."""
    params = new_params()
    optimizer = FusedAdamS(params, schedule="lagged", process_group=dist.group.WORLD)
    for t in range(2):
        take_step(params, optimizer, t)
    optimizer.schedule = "exact"
    for t in range(2, 4):
        take_step(params, optimizer, t)
    optimizer.schedule = "lagged"
    others = copy.deepcopy(params)
    loaded = FusedAdamS(others, schedule="lagged", process_group=dist.group.WORLD)
    loaded.load_state_dict(optimizer.state_dict())
    take_step(params, optimizer, 4)
    take_step(others, loaded, 4)
    return [float(optimizer.exp_avg_sq_mean), float(loaded.exp_avg_sq_mean)]


def process_group_set_later() -> dict[str, Any]:
    """In the groups of a run over both ranks: each rank by itself from then on, and both together again."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    means: dict[str, Any] = {}
    for schedule in ("exact", "lagged"):
        params = new_params()
        optimizer = FusedAdamS(params, schedule=schedule, process_group=dist.group.WORLD)  # type: ignore[arg-type]
        for t, group in enumerate((dist.group.WORLD, alone, dist.group.WORLD)):
            optimizer.param_groups[0]["process_group"] = group
            others = copy.deepcopy([param.detach() for param in params])
            expected = FusedAdamS(
                [nn.Parameter(other) for other in others],
                schedule=schedule,  # type: ignore[arg-type]
                process_group=group,
            )
            expected.load_state_dict(optimizer.state_dict())
            take_step(params, optimizer, t)
            take_step(expected.param_groups[0]["params"], expected, t)
            means[f"{schedule} {t}"] = float(optimizer.exp_avg_sq_mean), float(expected.exp_avg_sq_mean)
        optimizer.param_groups[0]["process_group"] = "world"
        means[f"{schedule} nonsense"] = message_of(take_step, params, optimizer, 3)
    return means


@pytest.mark.parametrize("rank", range(2))
def test_a_schedule_that_comes_back_starts_from_the_state(rank: int) -> None:
    mean, expected = once_on_ranks(2, there_and_back)[rank]
    assert mean == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_process_group_set_later_is_obeyed(schedule: str) -> None:
    both = once_on_ranks(2, process_group_set_later)
    for t in range(3):
        for means in both:
            mean, expected = means[f"{schedule} {t}"]
            assert mean == pytest.approx(expected, rel=1e-12)
        are_equal = both[0][f"{schedule} {t}"][0] == both[1][f"{schedule} {t}"][0]
        assert are_equal == (t != 1), "over both ranks, each by itself, over both"
    for means in both:
        assert "process_group='world', wanted a torch.distributed.ProcessGroup" in means[f"{schedule} nonsense"]


# --- Offloaded shards


@pytest.mark.parametrize(("served", "place"), [(("cuda",), "cuda"), (("cpu", "cuda"), "cpu")])
def test_sums_of_offloaded_shards_travel_where_their_group_can(served: tuple[str, ...], place: str) -> None:
    """NCCL alone knows nothing of the CPU, where FSDP2's CPUOffloadPolicy keeps parameters."""
    group: Any = SimpleNamespace(_device_types=[torch.device(name) for name in served])
    assert device_for(group, torch.device("cpu")) == torch.device(place)
