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
