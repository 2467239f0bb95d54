"""Steps with other parameters and other state for a while, as torch 2.15's swap_in_optimizer_params_and_state does."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.runs import random_grads, random_params, run

SHAPES = [(6,), (3, 4), ()]

Params = list[torch.nn.Parameter]


@contextmanager
def swapped_in(optimizer: torch.optim.Optimizer, params: Params, state_dict: dict[str, Any]) -> Iterator[None]:
    """Does what torch's does: only what is written to the state dict's tensors in place is seen afterwards."""
    own_state, own_groups = optimizer.state, [dict(group) for group in optimizer.param_groups]
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    given = iter(params)
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        assert group.keys() == saved.keys(), "torch raises if they are not the same"
        group.update({**saved, "params": [next(given) for _ in saved["params"]]})
        for param, key in zip(group["params"], saved["params"], strict=True):
            state[param] = dict(state_dict["state"].get(key, {}))
    optimizer.state = state
    try:
        yield
    finally:
        optimizer.state = own_state
        for group, own in zip(optimizer.param_groups, own_groups, strict=True):
            group.clear()
            group.update(own)


def steps_of(state_dict: dict[str, Any]) -> list[float]:
    return [float(state["step"]) for state in state_dict["state"].values()]


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_the_callers_state_goes_on(backend: str, schedule: str) -> None:
    """Moments and parameters come out as an optimizer of its own would leave them; step counts are the caller's."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 6)
    optimizer = FusedAdamS(params, schedule=schedule, backend=backend)
    run(params, grads[:2], optimizer)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    state_dict = copy.deepcopy(optimizer.state_dict())
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    twin = FusedAdamS(twins, schedule=schedule, backend=backend)
    twin.load_state_dict(state_dict)
    run(twins, grads[2:5], twin)

    with swapped_in(optimizer, others, state_dict):
        run(others, grads[2:4], optimizer)
    for state in state_dict["state"].values():  # which torch expects to be written to in place, and are not
        state["step"].add_(2)
    with swapped_in(optimizer, others, state_dict):
        run(others, grads[4:5], optimizer)
    assert all(map(torch.equal, others, twins))
    assert steps_of(optimizer.state_dict()) == [2.0] * 3
    run(params, grads[5:], optimizer)
    assert steps_of(optimizer.state_dict()) == [3.0] * 3


@pytest.mark.parametrize("count", [100, 100.0, torch.tensor(100), torch.tensor([100.0], dtype=torch.float64)], ids=str)
def test_a_step_count_of_any_kind_is_obeyed(backend: str, count: Any) -> None:
    params, grads = random_params(SHAPES[:2]), random_grads(SHAPES[:2], 4)
    others = copy.deepcopy(params)
    optimizer, expected = (FusedAdamS(two, backend=backend) for two in (params, others))
    run(params, grads[:2], optimizer)
    run(others, grads[:2], expected)
    state_dict = copy.deepcopy(expected.state_dict())
    state_dict["state"][1]["step"].fill_(100.0)
    expected.load_state_dict(state_dict)
    optimizer.state[params[1]]["step"] = copy.deepcopy(count)  # which is advanced in place if it is a tensor
    run(params, grads[2:], optimizer)
    run(others, grads[2:], expected)
    assert all(map(torch.equal, params, others))
    assert [float(optimizer.state[param]["step"]) for param in params] == [4.0, 102.0]
