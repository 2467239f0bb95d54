"""Kernels that are told addresses must notice when a tensor has moved, or lies otherwise than before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.runs import random_grads, random_params

SHAPES = [(4, 5), (30,), (), (0,)]
STEPS = 4

Params = list[torch.nn.Parameter]


def another_place(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def another_order(tensor: Tensor) -> Tensor:
    return tensor.detach().t().contiguous().t()


def another_sign(tensor: Tensor) -> Tensor:
    """The same values, lazily negated."""
    return torch._neg_view(-tensor)


def set_param(params: Params, optimizer: FusedAdamS, change: Callable[[Tensor], Tensor]) -> None:
    params[0].data = change(params[0].data)


def set_grad(params: Params, optimizer: FusedAdamS, change: Callable[[Tensor], Tensor]) -> None:
    params[0].grad = change(params[0].grad)  # type: ignore[arg-type]


def set_exp_avg(params: Params, optimizer: FusedAdamS, change: Callable[[Tensor], Tensor]) -> None:
    moment = optimizer.state[params[0]]["exp_avg"]
    moment.data = change(moment)


def replace_exp_avg_sq(params: Params, optimizer: FusedAdamS, change: Callable[[Tensor], Tensor]) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg_sq"] = change(state["exp_avg_sq"])


def steps(backend: str, options: dict[str, object], between: Callable[[Params, FusedAdamS], None]) -> list[Tensor]:
    torch.manual_seed(0)
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params, backend=backend, weight_decay=1e-2, **options)  # type: ignore[arg-type]
    for step, grads in enumerate(random_grads(SHAPES, STEPS)):
        for param, grad in zip(params, grads, strict=True):
            if step == 0 or param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad.copy_(grad)
        if step > 0:
            between(params, optimizer)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"schedule": "lagged"}], ids=str)
@pytest.mark.parametrize(
    ("move", "change"),
    [
        (set_param, another_place),
        (set_param, another_order),
        (set_grad, another_place),
        (set_grad, another_order),
        (set_grad, another_sign),
        (set_exp_avg, another_place),
        (replace_exp_avg_sq, another_place),
        (replace_exp_avg_sq, another_order),
    ],
)
def test_a_tensor_may_move_between_steps(
    backend: str, move: Callable[..., None], change: Callable[[Tensor], Tensor], options: dict[str, object]
) -> None:
    moved = steps(backend, options, lambda params, optimizer: move(params, optimizer, change))
    unmoved = steps(backend, options, lambda params, optimizer: None)
    for param, expected in zip(moved, unmoved, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.backends(without=("torch",))
def test_a_parameter_may_come_to_lie_otherwise_in_the_same_place(backend: str) -> None:
    results = []
    for name in (backend, "torch"):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(6, 6))
        param.grad = torch.randn(6, 6)
        optimizer = FusedAdamS([param], backend=name)
        optimizer.step()
        param.data = param.data.t()
        optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
