"""States move between FusedAdamS and torch.optim.Adam and AdamW, in both directions, and keep their dtype."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.runs import is_interpreted, random_grads, random_params, run

SHAPES = [(30,), (4, 5), ()]
IMPLEMENTATIONS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("ours_first", [False, True], ids=["torch began", "we began"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("peer", [torch.optim.Adam, torch.optim.AdamW])
def test_one_continues_what_the_other_began(
    backend: str, peer: Any, amsgrad: bool, implementation: dict[str, bool], ours_first: bool
) -> None:
    """Half the steps by each are, without decay, all of them by Adam."""
    half = 2 if is_interpreted(backend) else 4
    params, grads = random_params(SHAPES), random_grads(SHAPES, 2 * half)
    twins = [copy.deepcopy(param) for param in params]
    options = {"lr": 0.01, "weight_decay": 0.0, "amsgrad": amsgrad}
    run(twins, grads, torch.optim.Adam(twins, **options))

    order = [
        lambda **own: peer(params, **own, **implementation),
        lambda **own: FusedAdamS(params, **own, backend=backend),
    ]
    begin, go_on = reversed(order) if ours_first else order
    first, second = begin(**options), go_on(weight_decay=0.0)
    run(params, grads[:half], first)
    second.load_state_dict(first.state_dict())
    assert (second.param_groups[0]["lr"], second.param_groups[0]["amsgrad"]) == (0.01, amsgrad)
    run(params, grads[half:], second)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=0, atol=1e-6)


def test_loading_widens_16_bit_moments_and_keeps_wider_ones(backend: str) -> None:
    for param_dtype, saved, expected in (
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ):
        params = random_params([(9,)], param_dtype)
        state = {"step": torch.tensor(3.0), "exp_avg": torch.rand(9).to(saved), "exp_avg_sq": torch.rand(9).to(saved)}
        optimizer = FusedAdamS(params, backend=backend)
        optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
        run(params, random_grads([(9,)], 2, param_dtype), optimizer)
        assert optimizer.state[params[0]]["exp_avg_sq"].dtype == expected
        assert params[0].isfinite().all()


def test_loading_does_not_change_the_backend() -> None:
    params = random_params(SHAPES)
    saved = FusedAdamS(params, backend="cpu", schedule="lagged", max_grad_norm=None)
    run(params, random_grads(SHAPES, 2), saved)
    optimizer = FusedAdamS(params, backend="torch")
    optimizer.load_state_dict(saved.state_dict())
    assert "backend: torch\n" in repr(optimizer)
    assert optimizer.schedule == "exact"


@pytest.mark.backends(interpreted=False)
def test_entries_that_belong_to_no_parameter_are_kept(backend: str) -> None:
    """As torch does; and those that a parameter has beside its moments, before and after its first step."""
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params, backend=backend)
    optimizer.state["note"] = 1
    optimizer.state[params[0]]["tag"] = "first"
    for steps in (2, 4):
        loaded = FusedAdamS(params, backend=backend)
        loaded.load_state_dict(optimizer.state_dict())
        for kept in (loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert kept.state["note"] == 1
            assert kept.state[kept.param_groups[0]["params"][0]]["tag"] == "first"
        run(params, random_grads(SHAPES, 2), optimizer)
        assert optimizer.state[params[0]]["step"] == steps
    optimizer.step(grad_sumsq=1.0, numel=51)  # looks at all state
