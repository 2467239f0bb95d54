"""Keys of parameter groups, and entries of the state, that are set after construction: obeyed by the next step, or
refused while nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.runs import random_grads, random_params, run

nan = float("nan")
SHAPES = [(30,), (4, 5)]

REFUSED: list[tuple[dict[str, Any], str, Any, str]] = [
    *(({}, "bias_correction", value, "bias_correction=.*wanted True or False") for value in (0.5, 1, None)),
    *(({}, "amsgrad", value, "amsgrad=.*wanted True or False") for value in ("no", 1)),
    *(({}, "maximize", value, "maximize=.*wanted True or False") for value in ("no", -1)),
    *(
        ({"adamw_weight_decay": 0.1}, "calibration_steps", value, "calibration_steps=.*wanted a whole number >= 0")
        for value in (-1, 1.5, True, None)
    ),
    *(
        ({}, "adamw_weight_decay", value, "adamw_weight_decay=.*wanted a finite number >= 0")
        for value in (-1, nan, "0.1")
    ),
    ({"decay": "l2"}, "adamw_weight_decay", 0.1, "adamw_weight_decay=0.1 with decay='l2'.*Use weight_decay"),
    ({}, "state_dtype", "4bit", "state_dtype='4bit', wanted one of"),
    ({}, "max_decay", 0, r"max_decay=0, wanted a number in \(0, 1\]"),
    ({}, "weigth_decay", 0.1, r"unknown key weigth_decay=0\.1 in a parameter group. Did you mean weight_decay\?"),
    ({}, "max_grad_norms", 0.1, r"Did you mean max_grad_norm\?"),
    *(({}, name, 1, f"{name}=1 in a parameter group.*holds for all") for name in ("max_grad_norm", "seed", "backend")),
    ({}, "schedule", "lagged", r"schedule='lagged' in a parameter group.*holds for all groups"),
    ({}, "differentiable", True, "differentiable=True"),
    ({}, "process_group", "world", "process_group='world', wanted a torch.distributed.ProcessGroup or None"),
    *(({}, "lr", torch.tensor(value, device="cpu"), "lr=.*wanted a finite number >= 0") for value in (-1.0, nan)),
    ({}, "lr", torch.tensor(float("inf"), device="cpu"), "lr=.*wanted a finite number >= 0"),
    ({}, "betas", (torch.tensor(nan), torch.tensor(0.9)), "betas=.*wanted two numbers"),
    *(({}, "betas", betas, "betas=.*wanted two numbers") for betas in ((-0.5, 0.999), (0.9, -0.5), (0.9, "0.9"))),
]


def assert_refused(optimizer: FusedAdamS, params: list[torch.nn.Parameter], message: str) -> None:
    def state() -> Any:
        return [param.detach().clone() for param in params], copy.deepcopy([optimizer.state.get(p) for p in params])

    before = state()
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    torch.testing.assert_close(state(), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("options", "key", "value", "message"), REFUSED, ids=str)
def test_refused_by_the_next_step(
    options: dict[str, Any], key: str, value: Any, message: str, steps_before: int
) -> None:
    """In the second group; and when it is set right the run goes on as if nothing had been."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
    others = copy.deepcopy(params)
    optimizer, untouched = (
        FusedAdamS([{"params": two[:1]}, {"params": two[1:]}], **options) for two in (params, others)
    )
    run(params, grads[:steps_before], optimizer)
    group = optimizer.param_groups[1]
    usual = group.copy()
    group[key] = value
    assert_refused(optimizer, params, message)
    assert_refused(optimizer, params, message)
    group.clear()
    group.update(usual)
    run(params, grads[steps_before:], optimizer)
    run(others, grads, untouched)
    assert all(map(torch.equal, params, others))


def test_refused_by_load_state_dict_as_well() -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params)
    run(params, random_grads(SHAPES, 1), optimizer)
    for key, value in (("bias_correction", 0.5), ("calibration_steps", -1), ("weigth_decay", 0.1), ("seed", 1)):
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["param_groups"][0][key] = value
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict(state_dict)
        assert optimizer.param_groups[0].get(key) != value


def test_a_tensor_lr_is_checked_each_time_it_changes() -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params, lr=torch.tensor(0.01, device="cpu"))
    run(params, random_grads(SHAPES, 2), optimizer)
    for bad in (-1.0, nan):
        optimizer.param_groups[0]["lr"].fill_(bad)
        assert_refused(optimizer, params, "lr=.*wanted a finite number >= 0")
    optimizer.param_groups[0]["lr"].fill_(-1e-20)  # what schedulers that end at zero miss it by
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert all(map(torch.equal, params, before))


def test_one_key_that_takes_the_place_of_another() -> None:
    """With the very same value: only the name tells."""
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params)
    group = optimizer.param_groups[0]
    group["weight_decay_mult"] = 0.5
    run(params, random_grads(SHAPES, 2), optimizer)
    group["weigth_decay"] = group.pop("weight_decay_mult")
    assert_refused(optimizer, params, "weigth_decay")


def test_keys_of_others_pass_and_may_change_in_each_step() -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
    others = copy.deepcopy(params)
    optimizer = FusedAdamS(params)
    for t, step_grads in enumerate(grads):
        group = optimizer.param_groups[0]
        group.update(initial_lr=0.1, swa_lr=t, step=t, lr_scale=0.5, weight_decay_mult=[t], name="all", momentum=0.9)
        run(params, [step_grads], optimizer)
    run(others, grads, FusedAdamS(others))
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_parameters_that_are_put_into_a_group_later_are_checked(steps_before: int) -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS([{"params": params[:1]}, {"params": params[1:]}])
    run(params, random_grads(SHAPES, steps_before), optimizer)
    optimizer.param_groups[1]["params"].append(params[0])
    assert_refused(optimizer, params, r"parameter of shape \(30,\) twice")
    optimizer.param_groups[1]["params"][1] = torch.nn.Parameter(torch.ones(3, 1).expand(3, 4))
    assert_refused(optimizer, params, "memory of their own")
    del optimizer.param_groups[1]["params"][1]
    optimizer.step()


# --- Entries of the state


@pytest.mark.parametrize("count", [100, 100.0, torch.tensor(100), torch.tensor([100.0], dtype=torch.float64)], ids=str)
def test_a_step_count_of_any_kind_is_obeyed(backend: str, count: Any) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(
            ("step", value, "step=.*wanted a whole number >= 0")
            for value in (-1, 1.5, nan, True, "3", None, torch.ones(2), torch.tensor(-1.0))
        ),
        ("exp_avg", 3, "exp_avg of type int, wanted a tensor"),
        ("exp_avg_sq", None, "exp_avg_sq of type NoneType, wanted a tensor"),
    ],
    ids=str,
)
def test_nonsense_in_the_state_is_refused(key: str, value: Any, message: str) -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params)
    run(params, random_grads(SHAPES, 2), optimizer)
    usual = optimizer.state[params[1]][key]
    optimizer.state[params[1]][key] = value
    before = [param.detach().clone() for param in params], float(optimizer.state[params[0]]["step"])
    with pytest.raises(RuntimeError, match=rf"{message}.*shape \(4, 5\)"):
        optimizer.step()
    assert all(map(torch.equal, params, before[0]))
    assert float(optimizer.state[params[0]]["step"]) == before[1]
    optimizer.state[params[1]][key] = usual
    optimizer.step()


# --- What a step is given

GIVEN: list[tuple[dict[str, Any], str]] = [
    *(({"grad_sumsq": torch.tensor(value, device="cpu")}, "wanted a number >= 0") for value in (-1.0, nan)),
    ({"grad_sumsq": nan}, "grad_sumsq=nan, wanted a number >= 0"),
    ({"grad_sumsq": True}, "grad_sumsq=True, wanted a number >= 0"),
    *(({"grad_sumsq": 1.0, "numel": value}, "numel=.*wanted the number") for value in (True, 2.5, -3, "3")),
]


@pytest.mark.parametrize(("given", "message"), GIVEN, ids=str)
@pytest.mark.parametrize("by_provider", [False, True])
def test_a_given_sum_is_checked(given: dict[str, Any], message: str, by_provider: bool) -> None:
    (param,) = params = random_params([(3,)])
    before = param.detach().clone()
    param.grad = torch.ones(3)
    optimizer = FusedAdamS(params)
    arguments = given
    if by_provider:
        optimizer.grad_sumsq_provider = lambda: (given["grad_sumsq"], given.get("numel"))
        arguments = {}
    with pytest.raises(ValueError, match=message):
        optimizer.step(**arguments)
    assert torch.equal(param, before)
    assert not optimizer.state


@pytest.mark.parametrize("grad_sumsq", [nan, torch.tensor(nan), float("inf")], ids=str)
def test_a_step_that_may_be_skipped_takes_any_sum(grad_sumsq: Any) -> None:
    """It is what bad gradients have, and what tells to skip."""
    (param,) = params = random_params([(3,)])
    before = param.detach().clone()
    optimizer = FusedAdamS(params, skip_nonfinite=True)
    param.grad = torch.full((3,), nan)
    optimizer.step(grad_sumsq=grad_sumsq)
    assert torch.equal(param, before)
    assert int(optimizer.skipped_steps) == 1
