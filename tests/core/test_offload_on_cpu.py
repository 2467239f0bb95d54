"""`offload=True` where parameters are on the CPU: it changes nothing, and is checked all the same."""

from __future__ import annotations

import copy

import pytest
import torch

from swd_fused import FusedAdamS
from tests.device import DEVICE
from tests.runs import random_grads, random_params, run

SHAPES = [(30,), (7, 5)]

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="is about the CPU")


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_it_means_nothing_on_the_cpu(schedule: str) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
    others = copy.deepcopy(params)
    optimizer = FusedAdamS(params, schedule=schedule, offload=True)  # type: ignore[arg-type]
    run(params, grads, optimizer)
    run(others, grads, FusedAdamS(others, schedule=schedule))  # type: ignore[arg-type]
    assert all(map(torch.equal, params, others))
    assert all(param.grad is not None for param in params)


def test_triton_is_refused() -> None:
    with pytest.raises(ValueError, match='got offload=True with backend="triton"'):
        FusedAdamS(random_params(SHAPES), offload=True, backend="triton")


def test_it_is_not_changed_later() -> None:
    optimizer = FusedAdamS(random_params(SHAPES))
    with pytest.raises(AttributeError, match="offload cannot be set"):
        optimizer.offload = True  # type: ignore[misc]
