"""`optimizer.rms_grads()`: the roots of the means of v^ that float64 finds in the state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from swd_fused import FusedAdamS, FusedAdamW, rms_grads
from swd_fused.drivers import release
from swd_fused.state.eight_bit import CODES
from swd_fused.state.storage import decoded_moment
from tests.device import DEVICE
from tests.runs import random_params, run, steps_for

pytestmark = pytest.mark.usefixtures("_codes_of_small_tensors")

SHAPES = [(257,), (31, 17), (), (0,), (3, 5, 7), (40, 20)]
FROZEN, LATE = 4, 2  # this parameter never has a gradient, that one only after the others

CASES: list[Any] = [
    pytest.param(FusedAdamS, torch.float32, {"max_grad_norm": 0.1}, id="clipped"),
    pytest.param(FusedAdamS, torch.float64, {"amsgrad": True, "maximize": True}, id="amsgrad"),
    pytest.param(FusedAdamS, torch.float32, {"schedule": "lagged"}, id="lagged"),
    pytest.param(FusedAdamW, torch.float32, {"state_dtype": "8bit"}, id="8 bits"),
    pytest.param(FusedAdamW, torch.bfloat16, {"master_weights": True, "ema_decay": 0.9}, id="masters"),
    pytest.param(FusedAdamS, torch.complex64, {"bias_correction": False}, id="complex"),
]


def trained(kind: Any, dtype: torch.dtype, backend: str, **options: Any) -> tuple[list[nn.Parameter], FusedAdamS]:
    """Trains two groups whose gradients differ in size, by tensor and from step to step."""
    params = random_params(SHAPES, torch.float64)
    params = [nn.Parameter(param.detach().to(DEVICE, dtype)) for param in params]
    groups = [{"params": params[:3], "betas": (0.8, 0.95)}, {"params": params[3:]}]
    optimizer = kind(groups, lr=1e-3, backend=backend, **options)
    run(params, grads(params, steps_for(backend, 6)), optimizer)
    return params, optimizer


def grads(params: list[nn.Parameter], steps: int) -> list[list[torch.Tensor | None]]:
    scale = [10.0 ** (i - 3) for i in range(len(params))]
    return [
        [
            None if i == FROZEN or (i == LATE and t < 2) else scale[i] * torch.randn_like(param) / (1 + t)
            for i, param in enumerate(params)
        ]
        for t in range(steps)
    ]


def expected(optimizer: FusedAdamS) -> dict[int, float]:
    """Computes them in float64 from the state."""
    found, number = {}, 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if state and param.numel() and state["step"] > 0:
                v = state["max_exp_avg_sq"] if group["amsgrad"] else decoded_moment(state, "exp_avg_sq")
                v = (torch.view_as_real(v) if v.is_complex() else v).double()
                correction = 1 - group["betas"][1] ** float(state["step"]) if group["bias_correction"] else 1.0
                found[number] = float((v / correction).mean().sqrt())
            number += 1
    return found


def assert_right(optimizer: FusedAdamS) -> None:
    found = optimizer.rms_grads()
    wanted = expected(optimizer)
    assert list(found) == list(wanted)
    # The kernels add some elements in float32.
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-6)


@pytest.mark.backends(split=True)
@pytest.mark.parametrize(("kind", "dtype", "options"), CASES)
def test_they_come_from_the_step_and_equal_the_state(
    kind: Any, dtype: torch.dtype, options: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = trained(kind, dtype, backend, **options)
    monkeypatch.setattr(rms_grads, "decoded_moment", None)  # so that reading a moment fails
    assert (CODES["exp_avg_sq"] in optimizer.state[params[1]]) == (options.get("state_dtype") == "8bit")
    assert_right(optimizer)
    assert list(optimizer.rms_grads()) == [0, 1, 2, 5]


@pytest.mark.parametrize(("kind", "dtype", "options"), CASES)
def test_they_follow_what_is_loaded_or_written(
    kind: Any, dtype: torch.dtype, options: dict[str, Any], backend: str
) -> None:
    params, optimizer = trained(kind, dtype, backend, **options)
    before = optimizer.rms_grads()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.rms_grads() == pytest.approx(before, rel=1e-6)
    for state in optimizer.state.values():
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            if key in state:
                state[key].mul_(4)  # and after someone has written to it
    assert_right(optimizer)
    run(params, grads(params, 1), optimizer)
    assert_right(optimizer)


@pytest.mark.parametrize("options", [{"schedule": "lagged"}, {"decay": "decoupled"}], ids=str)
def test_of_released_gradients(options: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "GATHERED_BYTES", 1)
    net = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3)).to(DEVICE)
    optimizer = FusedAdamS(net.parameters(), backend=backend, **options)
    optimizer.release_gradients()
    for _ in range(3):
        net(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    assert_right(optimizer)


def test_a_skipped_step_leaves_them_as_they_are(backend: str) -> None:
    params, optimizer = trained(FusedAdamS, torch.float32, backend, skip_nonfinite=True)
    before = optimizer.rms_grads()
    run(params, [[torch.full_like(param, torch.inf) for param in params]], optimizer)
    assert optimizer.rms_grads() == before


def test_names_and_what_has_taken_no_step() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].bias.requires_grad_(False)
    optimizer = FusedAdamW(net.named_parameters())
    assert optimizer.rms_grads() == {}
    net(torch.full((4, 2), 1e3)).sum().backward()  # the first layer's inputs are large: its gradients explode
    optimizer.step()
    found = optimizer.rms_grads()
    assert list(found) == ["0.weight", "1.weight", "1.bias"]
    assert found["1.bias"] == pytest.approx(4)
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("late", late)]})
    assert optimizer.rms_grads() == pytest.approx(found)
    late.grad = torch.full((2,), 7.0)
    optimizer.step()
    assert optimizer.rms_grads()["late"] == pytest.approx(7)
