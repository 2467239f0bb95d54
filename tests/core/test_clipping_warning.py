"""The warning that clipping leaves nothing of the schedule, after the first scheduled steps."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.device import DEVICE

STEPS = 300  # looked at
SIZE = 16


def optimizer_of(**options: Any) -> FusedAdamS:
    param = torch.nn.Parameter(torch.ones(SIZE, device=DEVICE))
    return FusedAdamS([param], **{"max_grad_norm": 1.0, "lr": 1e-5, **options})


def messages_in(optimizer: FusedAdamS, norms: list[float]) -> list[tuple[int, str]]:
    """Takes a step with gradients of each norm. Returns the warnings, with the step before which they came."""
    found = []
    for index, norm in enumerate(norms):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.full_like(param, norm / math.sqrt(SIZE))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        found += [(index, str(warning.message)) for warning in caught]
        if DEVICE != "cpu":
            torch.accelerator.synchronize()
    return found


def test_warns_once_where_all_steps_were_clipped(backend: str) -> None:
    optimizer = optimizer_of(backend=backend)
    ((step, message),) = messages_in(optimizer, [3.0] * (STEPS + 20))
    assert step == STEPS
    assert "All of the first 300 scheduled steps were clipped to max_grad_norm=1" in message
    assert "the schedule is constant" in message
    assert 'decay="decoupled"' in message
    assert messages_in(optimizer, [3.0] * STEPS) == []


@pytest.mark.parametrize("unclipped", [0, 150, STEPS - 1])
def test_one_step_that_was_not_clipped_is_enough(unclipped: int) -> None:
    norms = [3.0] * (2 * STEPS)
    norms[unclipped] = 0.5
    assert messages_in(optimizer_of(), norms) == []


@pytest.mark.parametrize("options", [{"decay": "decoupled"}, {"weight_decay": 0.0}, {"max_grad_norm": None}])
def test_nothing_to_warn_of_without_a_schedule_or_clipping(options: dict[str, Any]) -> None:
    assert messages_in(optimizer_of(**options), [3.0] * (STEPS + 20)) == []


def test_calibration_does_not_count() -> None:
    """There weights decay as AdamW's by intention."""
    calibrated = {"adamw_weight_decay": 0.1, "calibration_steps": 50}
    ((step, _),) = messages_in(optimizer_of(**calibrated), [0.5] * 50 + [3.0] * (STEPS + 20))
    assert step == 50 + STEPS
    assert messages_in(optimizer_of(**calibrated), [3.0] * STEPS + [0.5] * (STEPS + 20)) == []


def test_skipped_steps_say_nothing() -> None:
    optimizer = optimizer_of(skip_nonfinite=True)
    assert messages_in(optimizer, [math.inf] * (STEPS + 20)) == []


def test_steps_in_parts() -> None:
    """As DeepSpeed takes them: the sum is that of the whole model, and each step counts once."""
    optimizer = optimizer_of()
    (param,) = optimizer.param_groups[0]["params"]
    other = torch.nn.Parameter(torch.ones(SIZE, device=DEVICE))
    optimizer.add_param_group({"params": [other]})
    steps = []
    for index in range(STEPS + 3):
        for part, absent in ((param, other), (other, param)):
            part.grad, absent.grad = torch.ones_like(part), None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step(grad_sumsq=2.0 * SIZE, numel=2 * SIZE)
            steps += [index] * len(caught)
    assert steps == [STEPS - 1]  # with the second part of this step, which was counted with the first


def test_as_an_error_it_leaves_everything_as_it_was() -> None:
    optimizer = optimizer_of()
    assert messages_in(optimizer, [3.0] * STEPS) == []
    (param,) = optimizer.param_groups[0]["params"]
    before = copy.deepcopy((param.detach(), optimizer.state_dict()["state"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="were clipped"):
            optimizer.step()
    torch.testing.assert_close((param.detach(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)
    assert messages_in(optimizer, [3.0]) == []
    assert not torch.equal(param.detach(), before[0])
