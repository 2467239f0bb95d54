"""Each option changes what a step does, or a test here says why it cannot."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.options import GROUP_OPTIONS, Options
from swd_fused.state.weights import AVERAGE
from tests.runs import random_params

STEPS = 3


class Change(NamedTuple):
    """Names another value of an option, and the other options with which it makes a difference."""

    value: Any
    others: dict[str, Any] = {}  # noqa: RUF012  # never written to
    dtype: torch.dtype = torch.float32


# Whoever adds an option adds it here.
CHANGES: dict[str, Change] = {
    "lr": Change(1e-2),
    "betas": Change((0.5, 0.5)),
    "eps": Change(0.5),
    "weight_decay": Change(5e-2),
    "amsgrad": Change(True, {"betas": (0.9, 0.1)}),
    "maximize": Change(True),
    "max_decay": Change(1e-3, {"weight_decay": 10.0}),
    "adamw_weight_decay": Change(0.5),
    "calibration_steps": Change(1, {"adamw_weight_decay": 0.5}),
    "bias_correction": Change(False),
    "state_dtype": Change("8bit"),
    "corrected_decay": Change(True, {"weight_decay": 5e-2}),
    "cautious_decay": Change(True, {"weight_decay": 5e-2}),
    "largest_lr": Change(1.0, {"corrected_decay": True, "weight_decay": 5e-2}),
    "ema_decay": Change(0.9, {"ema_decay": 0.5}),
    "ema_warmup": Change(True, {"ema_decay": 0.9}),
    "decay": Change("l2", {"weight_decay": 5e-2}),
    "master_weights": Change(True, dtype=torch.bfloat16),
    "stochastic_rounding": Change(True, dtype=torch.bfloat16),
    "seed": Change(1, {"state_dtype": "8bit"}),
    "skip_nonfinite": Change(True),
    "max_grad_norm": Change(1e-3),
    "schedule": Change("lagged", {"weight_decay": 5e-2}),
    "total_numel": Change(20_000, {"weight_decay": 5e-2}),
}
WITHOUT = {
    "process_group": "it is about other processes: tests/distributed",
    "largest_lr_so_far": "it is not asked for, but left by steps: tests/core/test_decay_kinds.py",
    "backend": "all of them compute the same: tests/core/test_definition.py",
    "outliers": "it acts from step 26 on: tests/core/test_outliers.py",
    "outlier_sigma": "the same",
}


def after_training(change: Change, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = random_params([(100, 120), (7,)], change.dtype)
    optimizer = FusedAdamS(params, **{"lr": 1e-3, **change.others, **options})
    for step in range(STEPS):
        for param in params:
            param.grad = (torch.randn(param.shape, dtype=torch.float64) * 0.1**step).to(param.dtype)
        if step == 1 and change is CHANGES["skip_nonfinite"]:
            params[1].grad[0] = torch.nan  # type: ignore[index]
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
    averages = [optimizer.state[param][AVERAGE] for param in params if AVERAGE in optimizer.state[param]]
    return [*(param.detach() for param in params), *averages]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_another_value_makes_another_step(name: str) -> None:
    change = CHANGES[name]
    before, after = after_training(change, {}), after_training(change, {name: change.value})
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_all_options_are_here() -> None:
    assert {*CHANGES, *WITHOUT} == {*GROUP_OPTIONS, *Options._fields}
