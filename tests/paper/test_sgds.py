"""SGDS is its formula: a decay of its own, then the step of torch.optim.SGD."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from swd_fused import SGDS
from tests.runs import error, random_grads, random_params, run, to_numpy

SHAPES = [(40, 3), (7,), ()]
STEPS = 30

SETTINGS = [
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 5e-3},
    {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 2e-2},
    {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 1e-2},
]


def by_formula(params: list[np.ndarray], grads: list[list[np.ndarray]], settings: dict[str, float]) -> list[np.ndarray]:
    lr, momentum, dampening = (np.longdouble(settings[name]) for name in ("lr", "momentum", "dampening"))
    shrink = lr * np.longdouble(settings["weight_decay"]) * (1 - dampening) / (1 - momentum)
    buffers = [np.zeros_like(p) for p in params]
    for step, step_grads in enumerate(grads):
        for i, grad in enumerate(step_grads):
            added = grad if step == 0 else (1 - dampening) * grad
            buffers[i] = momentum * buffers[i] + added
            params[i] = (1 - shrink) * params[i] - lr * (buffers[i] if momentum else grad)
    return params


@pytest.mark.parametrize("settings", SETTINGS)
def test_equals_its_formula(settings: dict[str, float]) -> None:
    params = random_params(SHAPES, torch.float64)
    grads = random_grads(SHAPES, STEPS, torch.float64)
    numpy_grads = [[to_numpy(grad) for grad in step] for step in grads]
    expected = by_formula([to_numpy(p) for p in params], numpy_grads, settings)
    wrong = by_formula([to_numpy(p) for p in params], numpy_grads, {**settings, "weight_decay": 0.0})
    run(params, grads, SGDS(params, **settings))
    assert error(params, expected) < 1e-14
    assert error(params, wrong) > 1e-3


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"maximize": True}, {"momentum": 0.0}, {"dampening": 0.5}])
def test_without_decay_equals_torch_sgd(options: dict[str, object]) -> None:
    params = random_params(SHAPES)
    twins = copy.deepcopy(params)
    grads = random_grads(SHAPES, STEPS)
    run(params, grads, SGDS(params, weight_decay=0.0, **options))  # type: ignore[arg-type]
    run(twins, grads, torch.optim.SGD(twins, lr=0.1, **{"momentum": 0.9, **options}))  # type: ignore[arg-type]
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


def test_decays_as_much_as_l2_in_the_long_run() -> None:
    """Without gradients of its own a weight under L2 and momentum ends up shrinking by lr * wd / (1 - momentum)."""
    ratios = []
    for optimizer_class in (SGDS, torch.optim.SGD):
        param = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = optimizer_class([param], lr=0.1, momentum=0.9, weight_decay=1e-3)
        for _ in range(400):
            before = param.item()
            param.grad = torch.zeros_like(param)
            optimizer.step()
        ratios.append(1 - param.item() / before)
    assert ratios[0] == pytest.approx(0.1 * 1e-3 / 0.1)
    assert ratios[1] == pytest.approx(ratios[0], rel=0.02)


def test_a_parameter_without_gradient_stays() -> None:
    params = random_params([(3,), (3,)])
    before = params[1].detach().clone()
    run(params, [[torch.ones(3), None]], SGDS(params))
    assert torch.equal(params[1], before)


def test_closure_hooks_and_state_dict() -> None:
    params = random_params([(5,)], torch.float64)
    twins = copy.deepcopy(params)
    grads = random_grads([(5,)], 6, torch.float64)
    whole = SGDS(params)
    run(params, grads, whole)
    first = SGDS(twins)
    run(twins, grads[:3], first)
    second = SGDS(twins)
    second.load_state_dict(first.state_dict())
    run(twins, grads[3:], second)
    assert torch.equal(params[0], twins[0])
    assert second.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": -1}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"dampening": 2}, "dampening"),
        ({"nesterov": True, "momentum": 0}, "nesterov"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SGDS(random_params([(2,)]), **options)  # type: ignore[arg-type]
