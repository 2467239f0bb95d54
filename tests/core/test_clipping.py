"""The share of steps that clipping has changed, and the warning where it leaves nothing of the schedule."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS, metrics
from tests.device import DEVICE
from tests.runs import fused, random_params, run

STEPS = 12  # looked at by the warning, in place of 300
SIZE = 16


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CLIPPED_STEPS", STEPS)


def of_norm(norm: float, *sizes: int) -> list[torch.Tensor]:
    """Returns a step's gradients that have this norm together."""
    return [torch.full((size,), norm / math.sqrt(sum(sizes))) for size in sizes]


def share(optimizer: FusedAdamS) -> float:
    return optimizer.metrics()["clipped_share"]


ONE_BUCKET = [{"params": [0, 1]}]
TWO_BUCKETS = [{"params": [0], "amsgrad": True}, {"params": [1]}]


@pytest.mark.parametrize("groups", [ONE_BUCKET, TWO_BUCKETS], ids=["one bucket", "two buckets"])
@pytest.mark.parametrize("decay", ["scheduled", "decoupled"])
def test_share_of_steps(backend: str, groups: list[dict[str, Any]], decay: str) -> None:
    params = random_params([(6,), (10,)])
    optimizer = fused(params, groups, backend=backend, decay=decay, max_grad_norm=1.0)
    assert math.isnan(share(optimizer))
    for norm, wanted in [(3.0, 1.0), (0.5, 1 / 2), (0.9, 1 / 3), (1.1, 2 / 4)]:
        run(params, [of_norm(norm, 6, 10)], optimizer)
        assert share(optimizer) == wanted
    optimizer.max_grad_norm = 10.0
    run(params, [of_norm(3.0, 6, 10)], optimizer)
    assert share(optimizer) == 2 / 5


def test_only_steps_that_may_clip_count(backend: str) -> None:
    params = random_params([(6,)])
    optimizer = fused(params, [{"params": [0]}], backend=backend)
    run(params, [of_norm(3.0, 6)], optimizer)
    assert "clipped_share" not in optimizer.metrics()
    optimizer.max_grad_norm = 1.0
    run(params, [of_norm(3.0, 6)], optimizer)
    assert share(optimizer) == 1


def test_skipped_steps_do_not_count(backend: str) -> None:
    params = random_params([(6,)])
    optimizer = fused(params, [{"params": [0]}], backend=backend, max_grad_norm=1.0, skip_nonfinite=True)
    run(params, [of_norm(3.0, 6), of_norm(math.inf, 6), of_norm(math.nan, 6), of_norm(0.5, 6)], optimizer)
    assert int(optimizer.skipped_steps) == 2
    assert share(optimizer) == 1 / 2


def test_a_step_in_parts_counts_once(backend: str) -> None:
    """As DeepSpeed takes it: the sum is that of the whole model."""
    params = random_params([(6,), (10,)])
    optimizer = fused(params, ONE_BUCKET, backend=backend, max_grad_norm=1.0)
    for norm in (3.0, 0.5, 0.9):
        grads = of_norm(norm, 6, 10)
        for index, grad in enumerate(grads):
            params[index].grad, params[1 - index].grad = grad, None
            optimizer.step(grad_sumsq=norm**2, numel=16)
    assert share(optimizer) == 1 / 3


def test_the_share_survives_copies_and_is_no_part_of_the_state() -> None:
    params = random_params([(6,)])
    optimizer = fused(params, [{"params": [0]}], max_grad_norm=1.0)
    run(params, [of_norm(3.0, 6), of_norm(0.5, 6)], optimizer)
    assert share(copy.deepcopy(optimizer)) == share(pickle.loads(pickle.dumps(optimizer))) == 1 / 2
    assert "clip" not in str(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert share(optimizer) == 1 / 2


# --- The warning


def optimizer_of(**options: Any) -> FusedAdamS:
    param = torch.nn.Parameter(torch.ones(SIZE, device=DEVICE))
    return FusedAdamS([param], **{"max_grad_norm": 1.0, "lr": 1e-5, **options})


def messages_in(optimizer: FusedAdamS, norms: list[float]) -> list[tuple[int, str]]:
    """Takes a step with gradients of each norm, and asks for metrics. Returns the warnings, with the step's number."""
    found = []
    for index, norm in enumerate(norms):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.full_like(param, norm / math.sqrt(SIZE))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.metrics()
        found += [(index + 1, str(warning.message)) for warning in caught]
    return found


def test_warns_once_where_all_steps_were_clipped(backend: str) -> None:
    optimizer = optimizer_of(backend=backend)
    ((step, message),) = messages_in(optimizer, [3.0] * (STEPS + 3))
    assert step == STEPS
    assert "All 12 steps so far were clipped to max_grad_norm=1" in message
    assert "the schedule is constant" in message
    assert 'decay="decoupled"' in message
    assert messages_in(optimizer, [3.0] * STEPS) == []


CLIPPED = [3.0] * (2 * STEPS)
SILENT: list[tuple[dict[str, Any], list[float]]] = [
    *(({}, [*CLIPPED[:step], 0.5, *CLIPPED[step:]]) for step in (0, 5, STEPS - 1)),
    *((options, CLIPPED) for options in ({"decay": "decoupled"}, {"weight_decay": 0.0}, {"max_grad_norm": None})),
    ({"skip_nonfinite": True}, [math.inf] * (STEPS + 3)),
]


@pytest.mark.parametrize(("options", "norms"), SILENT)
def test_one_unclipped_step_no_schedule_no_clipping_or_no_step_is_enough(
    options: dict[str, Any], norms: list[float]
) -> None:
    assert messages_in(optimizer_of(**options), norms) == []


def test_calibration_does_not_warn() -> None:
    """There weights decay as AdamW's by intention."""
    ((step, _),) = messages_in(optimizer_of(adamw_weight_decay=0.1, calibration_steps=STEPS + 3), CLIPPED)
    assert step == STEPS + 3
