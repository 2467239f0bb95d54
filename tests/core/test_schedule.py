"""The schedule: the lagged mean, what is logged, and how it compares with AdamW's decay."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from swd_fused import FusedAdamS
from tests.runs import error, fused, random_grads, random_params, run, to_numpy

SHAPES = [(300,), (40, 5)]


@pytest.mark.backends(split=True)
def test_lagged_leaves_out_parameters_that_have_not_stepped(backend: str) -> None:
    shapes = [(20,), (30,)]
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, 4, torch.float64)
    for step_grads in grads[:2]:
        step_grads[1] = None  # type: ignore[call-overload]
    only_first = [copy.deepcopy(params[0])]
    optimizer = FusedAdamS(params, schedule="lagged", backend=backend)
    peer = FusedAdamS(only_first, schedule="lagged", backend=backend)
    run(params, grads[:3], optimizer)
    run(only_first, [step_grads[:1] for step_grads in grads[:3]], peer)
    assert optimizer.exp_avg_sq_mean == peer.exp_avg_sq_mean
    run(params, grads[3:], optimizer)
    assert optimizer.exp_avg_sq_mean != peer.exp_avg_sq_mean


@pytest.mark.parametrize("removed", [0, 1])
def test_lagged_after_a_group_was_removed(backend: str, removed: int) -> None:
    """The mean is then over what is left."""
    shapes = [(40,), (50,)]
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, 3, torch.float64)
    groups = [{"params": [0], "betas": (0.9, 0.9)}, {"params": [1], "betas": (0.9, 0.99)}]
    optimizer = fused(params, groups, schedule="lagged", backend=backend)
    run(params, grads[:2], optimizer)
    del optimizer.param_groups[removed]
    left = params[1 - removed]
    beta2 = optimizer.param_groups[0]["betas"][1]
    mean = float((optimizer.state[left]["exp_avg_sq"] / (1 - beta2**2)).mean())
    run(params, grads[2:], optimizer)
    assert float(optimizer.exp_avg_sq_mean) == pytest.approx(mean, rel=1e-12)


@pytest.mark.backends(without=("torch",), split=True)
def test_lagged_with_betas_that_change(backend: str) -> None:
    """The mean of the step before is corrected with the betas that hold now, whoever computes it."""
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, 4, torch.float64)
    twins = [copy.deepcopy(param) for param in params]
    optimizers = [FusedAdamS(params, schedule="lagged", lr=0.1, backend=backend)]
    optimizers.append(FusedAdamS(twins, schedule="lagged", lr=0.1, backend="torch"))
    for optimizer, tensors in zip(optimizers, (params, twins), strict=True):
        run(tensors, grads[:3], optimizer)
        optimizer.param_groups[0]["betas"] = (0.9, 0.9)
        run(tensors, grads[3:], optimizer)
    torch.testing.assert_close(optimizers[0].exp_avg_sq_mean, optimizers[1].exp_avg_sq_mean, rtol=1e-12, atol=0)
    assert error(params, [to_numpy(twin) for twin in twins]) < 1e-14


def trained_on_digits(steps: int = 400, **options: Any) -> tuple[torch.Tensor, np.ndarray]:
    """The weights after training, and the effective weight decay of each step."""
    data = load_digits()
    x = torch.from_numpy(data.data / 16).float()
    y = torch.from_numpy(data.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = FusedAdamS(model.parameters(), **options)
    decay = []
    for _ in range(steps):
        batch = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        decay += optimizer.effective_weight_decay()
    return torch.cat([param.detach().flatten() for param in model.parameters()]), np.array(decay)


def test_lagged_is_close_to_exact_in_real_training() -> None:
    """Over 400 steps on digits. Run with -s to see the figures that docs/notes/algorithm.md states."""
    exact, exact_decay = trained_on_digits()
    lagged, lagged_decay = trained_on_digits(schedule="lagged")
    off = np.abs(lagged_decay / exact_decay - 1)
    total = abs(lagged_decay.sum() / exact_decay.sum() - 1)
    distance = float((lagged - exact).norm() / exact.norm())
    print(
        f"\nlagged decay off by {np.median(off):.3%} (median of steps), {np.quantile(off, 0.95):.2%} (95th percentile)"
    )
    print(f"lagged decay off by {total:.4%} in total, weights by {distance:.2%}")
    assert 0 < np.median(off) < 0.005
    assert 0 < total < 0.005
    assert 0 < distance < 0.01


@pytest.mark.parametrize("steps_before", [0, 3])
def test_one_step_of_calibration(backend: str, steps_before: int) -> None:
    """From a fresh start and in the middle of a run the next step is AdamW's, groups without decay left alone."""
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, steps_before + 2, torch.float64)
    groups = [{"params": params[:1], "eps": 1e-3}, {"params": params[1:], "weight_decay": 0.0}]
    optimizer = FusedAdamS(groups, lr=0.01, backend=backend)
    run(params, grads[:steps_before], optimizer)
    twins = [copy.deepcopy(param) for param in params]
    adamw = torch.optim.AdamW([{"params": twins[:1]}, {"params": twins[1:]}])
    adamw.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    adamw.param_groups[0].update(weight_decay=0.1, lr=0.01, eps=1e-3)

    optimizer.param_groups[0].update(adamw_weight_decay=0.1, calibration_steps=1)
    if steps_before:
        assert optimizer.effective_weight_decay() == pytest.approx([0.1, 0.0])
    run(params, grads[steps_before:-1], optimizer)
    adamw.param_groups[1].update(lr=0.01)
    run(twins, grads[steps_before:-1], adamw)
    assert error(params, [to_numpy(twin) for twin in twins]) < 1e-15
    assert optimizer.effective_weight_decay() == pytest.approx([0.1, 0.0], rel=1e-12)

    matched = optimizer.param_groups[0]["weight_decay"]
    run(params, grads[-1:], optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == matched
    assert optimizer.effective_weight_decay()[0] != pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("useless", [0.0, float("nan"), float("inf")])
def test_calibration_waits_for_a_usable_step(backend: str, useless: float) -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params, backend=backend)
    optimizer.param_groups[0].update(adamw_weight_decay=0.1, calibration_steps=1)
    run(params, [[torch.full(shape, useless) for shape in SHAPES]], optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 5e-4
    optimizer.state.clear()
    run(params, random_grads(SHAPES, 1), optimizer)
    assert optimizer.effective_weight_decay() == pytest.approx([0.1])


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3, dtype=torch.float64)], ids=["number", "tensor"])
def test_adamws_habit_is_noticed_in_the_first_step(backend: str, lr: float | torch.Tensor) -> None:
    """weight_decay=0.1 at an rms gradient of 3e-5 would remove three times each weight."""
    param = torch.nn.Parameter(torch.ones(1000))
    optimizer = FusedAdamS([param], lr=lr, weight_decay=0.1, backend=backend)
    grads = [[torch.full((1000,), 3e-5)]] * 3
    with pytest.warns(UserWarning, match=r"acts like 3\.33e\+03 in AdamW.*max_decay=0\.1 allows 10%") as caught:
        run([param], grads, optimizer)
    assert [warning.filename for warning in caught] == [run.__code__.co_filename]  # which calls step()
    assert str(caught[0].message).endswith("If so much is meant, pass a larger max_decay.")
    assert optimizer.effective_weight_decay() == [pytest.approx(100.0)]


def test_what_is_logged_is_unknown_before_the_first_step(backend: str) -> None:
    optimizer = FusedAdamS(random_params(SHAPES), backend=backend)
    assert optimizer.exp_avg_sq_mean.isnan()
    assert optimizer.grad_norm.isnan()
    assert np.isnan(optimizer.effective_weight_decay()).all()
