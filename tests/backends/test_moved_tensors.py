"""Kernels that are told addresses must notice when a tensor has moved, or lies otherwise than before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.runs import random_grads, random_params, set_grads

SHAPES = [(4, 5), (30,), (), (0,)]
STEPS = 4

Params = list[torch.nn.Parameter]
Move = Callable[[Params, FusedAdamS], object]


def elsewhere(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.detach().t().contiguous().t()


def negated(tensor: Tensor) -> Tensor:
    """The same values, lazily negated."""
    return torch._neg_view(-tensor)


def replace_exp_avg_sq(params: Params, optimizer: FusedAdamS) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg_sq"] = transposed(state["exp_avg_sq"])


def set_to(name: str, change: Callable[[Tensor], Tensor]) -> Move:
    return lambda params, _: setattr(params[0], name, change(getattr(params[0], name)))


def move_exp_avg(params: Params, optimizer: FusedAdamS) -> None:
    moment = optimizer.state[params[0]]["exp_avg"]
    moment.data = elsewhere(moment)


MOVES: dict[str, Move] = {
    "parameter elsewhere": set_to("data", elsewhere),
    "parameter transposed": set_to("data", transposed),
    "gradient transposed": set_to("grad", transposed),
    "gradient negated": set_to("grad", negated),
    "exp_avg elsewhere": move_exp_avg,
    "exp_avg_sq replaced": replace_exp_avg_sq,
}


def steps(backend: str, options: dict[str, object], move: Move) -> list[Tensor]:
    torch.manual_seed(0)
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params, backend=backend, weight_decay=1e-2, **options)  # type: ignore[arg-type]
    for step, grads in enumerate(random_grads(SHAPES, STEPS)):
        set_grads(params, grads)
        if step > 0:
            move(params, optimizer)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"schedule": "lagged"}], ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_a_tensor_may_move_between_steps(backend: str, move: str, options: dict[str, object]) -> None:
    moved, unmoved = (steps(backend, options, each) for each in (MOVES[move], lambda *_: None))
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
