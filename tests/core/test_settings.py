"""Attributes that are set after construction: obeyed from the next step on, or refused while nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swd_fused import FusedAdamS
from tests.device import DEVICE
from tests.runs import random_grads, random_params, run

SHAPES = [(300,), (31, 17)]


def test_attributes_of_others_are_theirs() -> None:
    """Schedulers, GradScaler and wrappers keep their own on an optimizer."""
    optimizer: Any = FusedAdamS(random_params([(3,)]))
    optimizer.grad_scale, optimizer.found_inf, optimizer._step_count, optimizer.max_norm = None, None, 3, 1.0
    assert (optimizer.grad_scale, optimizer._step_count, optimizer.max_norm) == (None, 3, 1.0)


# --- What is obeyed: as an optimizer that was built so and goes on from the same state

Setting = tuple[str, Any]
OBEYED: list[tuple[dict[str, Any], list[Setting]]] = [
    ({}, [("max_grad_norm", 0.5)]),
    ({"max_grad_norm": 0.5}, [("max_grad_norm", 3)]),
    ({"max_grad_norm": 0.5}, [("max_grad_norm", None)]),
    ({}, [("schedule", "lagged")]),
    ({"schedule": "lagged"}, [("schedule", "exact")]),
    ({"schedule": "lagged"}, [("schedule", "exact"), ("max_grad_norm", 0.5)]),
    ({"max_grad_norm": 0.5}, [("max_grad_norm", None), ("schedule", "lagged")]),
    ({"decay": "decoupled", "weight_decay": 0.1}, [("max_grad_norm", 0.5)]),
    ({}, [("total_numel", 5000)]),
    ({"total_numel": 5000}, [("total_numel", None)]),
]


def told(optimizer: FusedAdamS) -> list[Tensor]:
    return [optimizer.exp_avg_sq_mean.clone(), optimizer.grad_norm.clone()]


@pytest.mark.parametrize("amsgrad_of_second", [False, True], ids=["one bucket", "two buckets"])
@pytest.mark.parametrize(("options", "settings"), OBEYED, ids=str)
def test_obeyed_from_the_next_step_on(
    backend: str, options: dict[str, Any], settings: list[Setting], amsgrad_of_second: bool
) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)

    def new_optimizer(params: list[nn.Parameter], **options: Any) -> FusedAdamS:
        groups = [{"params": params[:1]}, {"params": params[1:], "amsgrad": amsgrad_of_second}]
        return FusedAdamS(groups, lr=0.01, backend=backend, **options)

    optimizer = new_optimizer(params, **options)
    run(params, grads[:2], optimizer)
    others, as_it_was = copy.deepcopy(params), copy.deepcopy((params, optimizer))
    built_so = new_optimizer(others, **{**options, **dict(settings)})
    built_so.load_state_dict(optimizer.state_dict())
    for name, value in settings:
        setattr(optimizer, name, value)
        assert getattr(optimizer, name) == value
    run(params, grads[2:], optimizer)
    run(others, grads[2:], built_so)
    run(as_it_was[0], grads[2:], as_it_was[1])
    assert all(map(torch.equal, params, others))
    assert all(map(torch.equal, told(optimizer), told(built_so)))
    assert not all(map(torch.equal, params, as_it_was[0])), "the setting makes a difference"


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
@pytest.mark.parametrize("later", ["torch", "cpu", "triton"])
def test_a_backend_set_later_takes_the_steps(backend: str, later: Any, schedule: Any) -> None:
    """Each rounds in its own way, so the bits tell which one it was. `repr` says the same."""
    if DEVICE != "cpu" and later == "cpu":
        pytest.skip("the C++ kernels are for the CPU")
    shapes = [(2000,), (31, 17)]
    params, grads = random_params(shapes), random_grads(shapes, 4)
    optimizer = FusedAdamS(params, lr=0.01, backend=backend, schedule=schedule)  # type: ignore[arg-type]
    run(params, grads[:2], optimizer)
    others, as_it_was = copy.deepcopy(params), copy.deepcopy((params, optimizer))
    built_so = FusedAdamS(others, lr=0.01, backend=later, schedule=schedule)
    built_so.load_state_dict(optimizer.state_dict())
    optimizer.backend = later
    assert repr(optimizer) == repr(built_so)
    run(params, grads[2:], optimizer)
    run(others, grads[2:], built_so)
    run(as_it_was[0], grads[2:], as_it_was[1])
    assert all(map(torch.equal, params, others))
    assert all(map(torch.equal, params, as_it_was[0])) == (later == backend)


# --- With gradient release, whose next step may have begun


def test_what_gradient_release_cannot_do_is_refused_at_once() -> None:
    for options, name, value in (
        ({"schedule": "lagged"}, "schedule", "exact"),
        ({"decay": "decoupled"}, "max_grad_norm", 1.0),
    ):
        param = nn.Parameter(torch.ones(3))
        optimizer = FusedAdamS([param], **options)
        released = optimizer.release_gradients()
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match="release_gradients"):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) == before
        for _ in range(2):
            param.sum().backward()
            optimizer.step()
        released.remove()
        setattr(optimizer, name, value)
        param.sum().backward()
        optimizer.step()
        assert int(optimizer.state[param]["step"]) == 3


def test_nothing_is_set_between_a_released_backward_pass_and_its_step() -> None:
    """Half of the parameters would be stepped with other settings than the rest."""
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamS([param], schedule="lagged", backend="cpu" if DEVICE == "cpu" else "auto")
    optimizer.release_gradients()
    for _ in range(2):
        param.sum().backward()
        optimizer.step()
    param.sum().backward()
    with pytest.raises(RuntimeError, match=r"backend=.*optimizer\.step\(\) first"):
        optimizer.backend = "torch"
    optimizer.step()
    optimizer.backend = "torch"
    param.sum().backward()
    optimizer.step()
    assert int(optimizer.state[param]["step"]) == 4
    assert "backend: torch" in repr(optimizer)
