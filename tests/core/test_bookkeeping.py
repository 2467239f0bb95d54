"""What surrounds the arithmetic: everything that is remembered follows from the state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.definition import MeanOfStepBefore
from tests.runs import defined, error, random_grads, random_params, run

SHAPES = [(20,), (30,), (7, 5)]


@pytest.mark.parametrize("key", ["exp_avg_sq", "max_exp_avg_sq"])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_write_to_the_second_moment_is_seen(backend: str, schedule: str, key: str) -> None:
    """Only of what torch counts. The state loaded anew is what it must equal."""
    options: dict[str, Any] = {"lr": 0.1, "schedule": schedule, "backend": backend, "amsgrad": key != "exp_avg_sq"}
    params, grads = random_params(SHAPES), random_grads(SHAPES, 3)
    optimizer = FusedAdamS(params, **options)
    run(params, grads[:2], optimizer)
    for param in params:
        optimizer.state[param][key].mul_(100)
    others = copy.deepcopy(params)
    loaded = FusedAdamS(others, **options)
    loaded.load_state_dict(optimizer.state_dict())
    run(params, grads[2:], optimizer)
    run(others, grads[2:], loaded)
    assert torch.equal(optimizer.exp_avg_sq_mean, loaded.exp_avg_sq_mean)
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("switched", [(False, False), (False, True), None], ids=str)
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_amsgrad_that_is_switched_between_steps_is_obeyed(
    backend: str, schedule: str, switched: tuple[bool, bool] | None
) -> None:
    """Off and on again, where maxima are far above the second moments, in all groups or one; or one group's in exchange
    for the other's. The state loaded anew is what it must equal."""
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.5), "schedule": schedule, "backend": backend}
    at_first = (True, True) if switched else (True, False)
    params = random_params(SHAPES)
    optimizer = FusedAdamS([{"params": params[:2]}, {"params": params[2:]}], **options)
    switch_amsgrad(optimizer, (True, True))
    small = [[0.01 * grad for grad in grads] for grads in random_grads(SHAPES, 4)]
    run(params, [*random_grads(SHAPES, 1), *small], optimizer)
    for amsgrad in (at_first, switched or (False, True), at_first):
        switch_amsgrad(optimizer, amsgrad)
        others = copy.deepcopy(params)
        loaded = FusedAdamS([{"params": others[:2]}, {"params": others[2:]}], **options)
        loaded.load_state_dict(optimizer.state_dict())
        run(params, small[:1], optimizer)
        run(others, small[:1], loaded)
        assert torch.equal(optimizer.exp_avg_sq_mean, loaded.exp_avg_sq_mean)
        assert all(map(torch.equal, params, others))
        run(params, small, optimizer)


def switch_amsgrad(optimizer: FusedAdamS, amsgrad: tuple[bool, bool]) -> None:
    for group, value in zip(optimizer.param_groups, amsgrad, strict=True):
        group["amsgrad"] = value


def come_and_go(steps: int) -> list[list[Tensor | None]]:
    """The first parameter's gradients are large, and it has one in every fourth step only; the last one comes late."""
    grads: list[list[Tensor | None]] = [*random_grads(SHAPES, steps, torch.float64)]
    for t, step_grads in enumerate(grads):
        step_grads[0] = None if t % 4 else 100 * step_grads[0]  # type: ignore[operator]
        if t < steps // 2:
            step_grads[2] = None
    return grads


@pytest.mark.backends(split=True)
def test_lagged_is_the_mean_of_all_that_have_taken_a_step(backend: str) -> None:
    params, grads = random_params(SHAPES, torch.float64), come_and_go(8)
    reference = defined(params, grads, [{"params": range(3)}], MeanOfStepBefore, lr=0.1)
    run(params, grads, FusedAdamS(params, lr=0.1, schedule="lagged", backend=backend))
    assert error(params, reference.params) < 1e-14


def skip_a_step(optimizer: FusedAdamS, params: list[torch.nn.Parameter]) -> None:
    """As GradScaler does it, with gradients where the last step had none."""
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.ones(1)  # type: ignore[attr-defined]
    for param in params:
        param.grad = torch.full_like(param, torch.inf)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@pytest.mark.parametrize("interruption", ["resume", "deepcopy", "skip"])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_interruptions_change_no_bit(backend: str, schedule: str, interruption: str) -> None:
    options: dict[str, Any] = {"lr": 0.1, "schedule": schedule, "backend": backend}
    params, grads = random_params(SHAPES, torch.float64), come_and_go(6)
    others = copy.deepcopy(params)
    run(others, grads, FusedAdamS(others, **options))
    optimizer = FusedAdamS(params, **options)
    for step_grads in grads:
        run(params, [step_grads], optimizer)
        if interruption == "resume":
            saved, optimizer = optimizer.state_dict(), FusedAdamS(params, **options)
            optimizer.load_state_dict(saved)
        elif interruption == "deepcopy":
            params, optimizer = copy.deepcopy((params, optimizer))
            optimizer.param_groups[0]["params"] = params
        else:
            skip_a_step(optimizer, params)
    assert all(map(torch.equal, params, others))


@pytest.mark.backends(interpreted=False)
def test_a_first_step_that_is_skipped_leaves_the_next_one_exact(backend: str) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 3)
    others = copy.deepcopy(params)
    run(others, grads, FusedAdamS(others, lr=0.1, schedule="lagged", backend=backend))
    optimizer = FusedAdamS(params, lr=0.1, schedule="lagged", backend=backend)
    skip_a_step(optimizer, params)
    run(params, grads, optimizer)
    assert all(map(torch.equal, params, others))


# --- Where nothing can be read, or nothing may be written


def test_steps_and_loading_in_inference_mode(backend: str) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 3)
    others = copy.deepcopy(params)
    run(others, grads, FusedAdamS(others, lr=0.1, backend=backend))
    optimizer = FusedAdamS(params, lr=0.1, backend=backend)
    with torch.inference_mode():
        run(params, grads[:1], optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    run(params, grads[1:], optimizer)
    assert all(map(torch.equal, params, others))
    assert not any(value.is_inference() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"max_grad_norm": 1.0}, {"amsgrad": True}], ids=str)
def test_a_step_on_meta_tensors(options: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 3, device="meta")
    optimizer = FusedAdamS(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.ones(2, 4, device="meta")).sum().backward()
        optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].is_meta
    assert "torch" in repr(optimizer)


@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"max_grad_norm": 1.0}], ids=str)
def test_a_step_on_fake_tensors(options: dict[str, Any]) -> None:
    from torch._subclasses import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        model = torch.nn.Linear(4, 3)
        optimizer = FusedAdamS(model.parameters(), lr=0.1, **options)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert isinstance(optimizer.state[model.weight]["exp_avg"], FakeTensor)
