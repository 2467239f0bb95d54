"""`adamw_weight_decay`: decay in AdamW's terms, and the warnings for those who forget that it is not."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.decay.observers import EARLY_STEPS
from tests.runs import error, random_grads, random_params, run, to_numpy

SHAPES = [(20,), (30,), (7, 5)]
STEPS = 3


def new(params: list[torch.nn.Parameter], backend: str, **options: Any) -> FusedAdamS:
    groups = [{"params": params[:2], "eps": 1e-4}, {"params": params[2:], "weight_decay": 0.0}]
    given = {"lr": 0.01, "adamw_weight_decay": 0.1, "calibration_steps": STEPS, "backend": backend, **options}
    return FusedAdamS(groups, **given)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_calibration_steps_are_adamws_and_the_schedule_goes_on_from_there(backend: str, schedule: str) -> None:
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, STEPS + 2, torch.float64)
    twins = copy.deepcopy(params)
    optimizer = new(params, backend, schedule=schedule)
    groups = [{"params": twins[:2], "eps": 1e-4}, {"params": twins[2:], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    for step_grads in grads[:STEPS]:
        run(params, [step_grads], optimizer)
        run(twins, [step_grads], adamw)
        assert error(params, [to_numpy(twin) for twin in twins]) < 1e-15
    mean = float(optimizer.exp_avg_sq_mean)
    assert optimizer.effective_weight_decay() == pytest.approx([0.1, 0.0], rel=1e-12)
    fixed = optimizer.param_groups[0]["weight_decay"]
    assert fixed == pytest.approx(0.1 * (math.sqrt(mean) + 1e-4), rel=1e-12)
    run(params, grads[STEPS:], optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == fixed
    assert optimizer.effective_weight_decay()[0] != pytest.approx(0.1, rel=1e-3)
    assert "\nadamw_weight_decay: 0.1, for 3 steps\n" in repr(optimizer)  # as it was asked for


def test_a_step_in_parts_counts_once(backend: str) -> None:
    """As DeepSpeed takes it: parameters of one group in several calls."""
    params = random_params(SHAPES)
    optimizer = new(params, backend)
    for part in params[:2]:
        for param in params:
            param.grad = torch.ones_like(param) if param is part else None
        optimizer.step(grad_sumsq=50.0, numel=85)
    assert [group["calibration_steps"] for group in optimizer.param_groups] == [STEPS - 1, 0]


# --- weight_decay=0 in a group that is calibrated


@pytest.mark.parametrize("steps_before", [0, 1])
def test_decay_that_is_switched_off_stays_off(backend: str, steps_before: int) -> None:
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, STEPS + 2, torch.float64)
    twins = copy.deepcopy(params)
    optimizer = new(params, backend)
    adamw = torch.optim.AdamW([{"params": twins[:2], "eps": 1e-4}, {"params": twins[2:]}], lr=0.01, weight_decay=0.0)
    adamw.param_groups[0]["weight_decay"] = 0.1
    for step, step_grads in enumerate(grads):
        if step == steps_before:
            optimizer.param_groups[0]["weight_decay"] = adamw.param_groups[0]["weight_decay"] = 0.0
        run(params, [step_grads], optimizer)
        run(twins, [step_grads], adamw)
        assert error(params, [to_numpy(twin) for twin in twins]) < 1e-15
        assert optimizer.effective_weight_decay()[0] == (0.1 if step < steps_before else 0.0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert optimizer.param_groups[0]["adamw_weight_decay"] is None


def test_decay_that_is_switched_on_again_is_adamws(backend: str) -> None:
    params = random_params(SHAPES)
    optimizer = new(params, backend)
    optimizer.param_groups[0]["weight_decay"] = 0
    run(params, random_grads(SHAPES, 1), optimizer)
    optimizer.param_groups[0]["weight_decay"] = 1e-3
    run(params, random_grads(SHAPES, 1), optimizer)
    assert optimizer.effective_weight_decay()[0] == pytest.approx(0.1, rel=1e-12)


def test_a_calibration_does_not_end_with_a_skipped_step(backend: str) -> None:
    """It counts, but its mean is of gradients that changed nothing."""
    params = random_params(SHAPES)
    optimizer = new(params, backend)
    run(params, random_grads(SHAPES, STEPS - 1), optimizer)
    optimizer.grad_scale = optimizer.found_inf = torch.ones((), device=params[0].device)  # as GradScaler sets them
    run(params, [[torch.full(shape, 1e3) for shape in SHAPES]], optimizer)
    del optimizer.grad_scale, optimizer.found_inf
    assert optimizer.param_groups[0]["calibration_steps"] == 0
    run(params, random_grads(SHAPES, 1), optimizer)
    assert optimizer.effective_weight_decay()[0] == pytest.approx(0.1, rel=1e-9)
    assert optimizer.param_groups[0]["adamw_weight_decay"] is None


# --- The warning early in training


def trained(steps: int, rms: float, weight_decay: float, reload: bool = False) -> None:
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = FusedAdamS([param], lr=3e-4, weight_decay=weight_decay)
    if reload:
        optimizer.load_state_dict(optimizer.state_dict())
    run([param], [[torch.full((100,), 1e-2)]] * (steps - 1) + [[torch.full((100,), rms)]], optimizer)


@pytest.mark.parametrize("reload", [False, True])
def test_adamws_value_out_of_habit_warns_though_max_decay_does_not_bind(reload: bool) -> None:
    """Also if a wrapper such as Accelerate's has loaded the new optimizer's state dict into it."""
    with pytest.warns(UserWarning, match=r"acts like 161 in AdamW.*adamw_weight_decay,.*weight_decay=6e-05") as caught:
        trained(1, 6.2e-4, 0.1, reload)
    assert len(caught) == 1


def test_a_decay_that_binds_as_the_learning_rate_rises_warns() -> None:
    """The host does not look at means that were harmless at a smaller learning rate."""
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = FusedAdamS([param], lr=1e-3, weight_decay=1.0)
    run([param], [[torch.full((100,), 1.0)]] * 2, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.warns(UserWarning, match=r"max_decay=0\.1 allows 10%"):
        run([param], [[torch.full((100,), 1.0)]], optimizer)


def test_the_papers_values_do_not_warn() -> None:
    """Its models have rms gradients of 2e-3 and more. A large one clipped to 1 warns."""
    trained(1, 2e-3, 5e-4)
    with pytest.warns(UserWarning, match=r"acts like 15\.\d in AdamW"):
        trained(1, 3.2e-5, 5e-4)


def test_a_decay_that_grows_later_is_the_method() -> None:
    param = torch.nn.Parameter(torch.ones(10))
    optimizer = FusedAdamS([param], lr=1e-4, betas=(0.9, 0.5))
    grads = [[torch.full((10,), 1e-2)]] * EARLY_STEPS + [[torch.full((10,), 1e-5)]] * 20
    run([param], grads, optimizer)
    assert optimizer.effective_weight_decay()[0] > 10


# --- What is worth logging


def test_metrics(backend: str) -> None:
    params = random_params([(3,), (4,)])
    groups = [{"params": params[:1], "name": "decay"}, {"params": params[1:], "weight_decay": 0.0}]
    optimizer = FusedAdamS(groups, skip_nonfinite=True, backend=backend)
    run(
        params,
        [[torch.full((3,), 3.0), torch.full((4,), 4.0)], [torch.full((3,), torch.nan), torch.ones(4)]],
        optimizer,
    )
    metrics = optimizer.metrics()
    by_group = {f"{name}/{group}" for name in ("effective_weight_decay", "decay_timescale") for group in ("decay", "1")}
    assert metrics.keys() == {"grad_norm", "rms_grad", "skipped_steps", *by_group}
    assert metrics["skipped_steps"] == 1
    assert all(type(value) is float for value in metrics.values())
    run(params, [[torch.full((3,), 3.0), torch.full((4,), 4.0)]], optimizer)
    metrics = optimizer.metrics()
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(3 * 9 + 4 * 16))
    assert metrics["rms_grad"] == pytest.approx(math.sqrt((3 * 9 + 4 * 16) / 7), rel=1e-6)
    assert metrics["effective_weight_decay/decay"] == pytest.approx(5e-4 / metrics["rms_grad"], rel=1e-6)
    assert metrics["effective_weight_decay/1"] == 0
    assert "decay_timescale/1" not in metrics
