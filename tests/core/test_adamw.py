"""FusedAdamW takes the place of torch.optim.AdamW: the same arguments, the same steps, the same checkpoints."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS, FusedAdamW
from tests.runs import random_grads, random_params, run

SHAPES = [(300,), (31, 17), ()]


def test_the_arguments_are_those_of_torch() -> None:
    ours, torchs = (dict(inspect.signature(kind).parameters) for kind in (FusedAdamW, torch.optim.AdamW))
    own = {"foreach", "capturable", "differentiable", "fused"}  # keywords for compatibility here
    expected = {name: parameter for name, parameter in torchs.items() if name not in own}
    assert list(ours)[: len(expected)] == list(expected)
    for name, parameter in expected.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    FusedAdamW(random_params(SHAPES), **dict.fromkeys(own, False))


def test_the_other_arguments_are_those_of_fusedadams() -> None:
    ours, others = (dict(inspect.signature(kind).parameters) for kind in (FusedAdamW, FusedAdamS))
    scheduled = {"decay", "schedule", "max_decay", "adamw_weight_decay", "calibration_steps"}
    assert set(others) - set(ours) == scheduled
    for name in set(ours) - {"weight_decay"}:
        assert ours[name].default == others[name].default, name


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3}, {"amsgrad": True, "maximize": True}], ids=str)
def test_it_takes_the_steps_of_torch(backend: str, options: dict[str, Any]) -> None:
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, 5, torch.float64)
    twins = copy.deepcopy(params)
    run(params, grads, FusedAdamW(params, lr=0.01, backend=backend, **options))  # type: ignore[arg-type]
    run(twins, grads, torch.optim.AdamW(twins, lr=0.01, **options))
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("error")
def test_checkpoints_go_to_torch_and_back_with_nothing_to_set() -> None:
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, 9, torch.float64)
    twins = copy.deepcopy(params)
    options = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.3}
    run(twins, grads, torch.optim.AdamW(twins, **options))  # type: ignore[arg-type]
    first: torch.optim.Optimizer = FusedAdamW(params, **options)  # type: ignore[arg-type]
    run(params, grads[:3], first)
    for kind, part in ((torch.optim.AdamW, grads[3:6]), (FusedAdamW, grads[6:])):
        second = kind(params)
        second.load_state_dict(first.state_dict())
        run(params, part, second)
        first = second
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-12, atol=1e-12)


def test_copies_are_of_its_class_and_say_so() -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamW(params, max_grad_norm=1.0, state_dtype=torch.bfloat16)
    run(params, random_grads(SHAPES, 2), optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is FusedAdamW
        assert repr(other) == repr(optimizer)
        assert other.options == optimizer.options
    assert repr(optimizer).startswith("FusedAdamW (\nbackend: ")
    assert optimizer.effective_weight_decay() == [0.01]


@pytest.mark.parametrize("options", [{"decay": "l2"}, {"schedule": "lagged"}, {"adamw_weight_decay": 0.1}], ids=str)
def test_what_is_the_schedules_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        FusedAdamW(random_params(SHAPES), **options)
    with pytest.raises(ValueError, match="decay='scheduled' in a parameter group"):
        FusedAdamW([{"params": random_params(SHAPES), "decay": "scheduled"}])
