"""Checkpoints in mixed precision: resumed bit for bit, moved between precisions, and from other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.runs import defined, error, fused, random_grads, random_params, run

SHAPES = [(700,), (31, 17), (), (3, 300)]
GROUPS = [{"params": range(len(SHAPES)), "lr": 1e-2, "weight_decay": 2e-3}]


def trained(dtype: torch.dtype, **options: Any) -> tuple[list[torch.nn.Parameter], FusedAdamS]:
    torch.manual_seed(1)
    params, grads = random_params(SHAPES, dtype), random_grads(SHAPES, 5, dtype)
    optimizer = fused(params, GROUPS, **options)
    run(params, grads, optimizer)
    return params, optimizer


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def test_masters_that_nothing_holds_are_dropped() -> None:
    params, optimizer = trained(torch.bfloat16, master_weights=True)
    wide = [torch.nn.Parameter(torch.zeros_like(param, dtype=torch.float32)) for param in params]
    peer = fused(wide, GROUPS)
    with pytest.warns(UserWarning, match=r"\(4 of torch.float32\) do not hold: they are dropped"):
        peer.load_state_dict(optimizer.state_dict())
    assert all(not param.any() for param in wide)
    assert all("master_remainder" not in peer.state[param] for param in wide)


@HALVES
def test_dropping_masters_warns_once(dtype: torch.dtype) -> None:
    """16-bit parameters without `master_weights=True` have no place for them."""
    params, optimizer = trained(dtype, master_weights=True)
    saved = optimizer.state_dict()
    peer = fused(params, GROUPS)
    with pytest.warns(UserWarning, match=rf"\(4 of {dtype}\).* dropped.*master_weights=True") as warned:
        peer.load_state_dict(saved)
    assert [warning.filename for warning in warned] == [__file__]
    assert not [key for key in peer.state[params[0]] if "master" in key]
    for param, state in zip(params, saved["state"].values(), strict=True):
        state.pop("master_remainder", None)
        state["master_param"] = param.detach().float()
    peer.load_state_dict(saved)  # nothing is lost: no warning, which would be an error here


def test_a_float32_run_goes_on_with_masters() -> None:
    """They begin as the parameters that the model was given."""
    params, optimizer = trained(torch.float32)
    narrow = [torch.nn.Parameter(param.detach().bfloat16()) for param in params]
    peer = fused(narrow, GROUPS, master_weights=True)
    peer.load_state_dict(optimizer.state_dict())
    group = peer.param_groups[0]
    group["lr"] = 0.0
    run(narrow, random_grads(SHAPES, 1, torch.bfloat16), peer)
    for param in narrow:
        assert torch.equal(peer.master_param(param), param.detach().float())


def test_moments_take_the_dtype_that_was_asked_for() -> None:
    params, optimizer = trained(torch.float32)
    peer = fused(params, GROUPS, state_dtype=torch.bfloat16)
    peer.load_state_dict(optimizer.state_dict())
    for param in params:
        assert torch.equal(peer.state[param]["exp_avg"], optimizer.state[param]["exp_avg"].bfloat16())
        assert peer.state[param]["exp_avg_sq"].dtype == torch.float32
    back = fused(params, GROUPS)
    back.load_state_dict(peer.state_dict())
    assert back.state[params[0]]["exp_avg"].dtype == torch.float32


def foreign_state(step_in_group: bool, masters: str) -> tuple[list[torch.nn.Parameter], dict[str, Any]]:
    """As apex (step in the group, an int), TransformerEngine (masters, or their remainders under the same name) and
    DeepSpeed (an int in the state) save."""
    params = random_params(SHAPES, torch.bfloat16)
    state = {}
    for i, param in enumerate(params):
        state[i] = {"exp_avg": torch.randn(param.shape), "exp_avg_sq": torch.rand(param.shape)}
        if not step_in_group:
            state[i]["step"] = 7
        if masters == "float32":
            state[i]["master_param"] = param.detach().float() * (1 + 2**-10)
        elif masters == "int16":
            state[i]["master_param"] = torch.full(param.shape, -5000, dtype=torch.int16)
    group = {"params": list(state), "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    group |= {"bias_correction": True, "step": 7} if step_in_group else {}
    return params, {"state": state, "param_groups": [group]}


@pytest.mark.parametrize("masters", ["none", "float32", "int16"])
@pytest.mark.parametrize("step_in_group", [True, False])
def test_state_of_other_libraries_loads(step_in_group: bool, masters: str) -> None:
    params, saved = foreign_state(step_in_group, masters)
    expected = [param.detach().float() for param in params]
    if masters == "float32":
        expected = [state["master_param"] for state in saved["state"].values()]
    elif masters == "int16":
        expected = [(master.view(torch.int32) - 5000).view(torch.float32) for master in expected]
    optimizer = fused(params, GROUPS, master_weights=True)
    with pytest.warns(UserWarning, match="keeping weight_decay=0.002"):
        optimizer.load_state_dict(saved)
    assert "step" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["bias_correction"] is True
    assert optimizer.param_groups[0]["lr"] == 1e-4
    optimizer.param_groups[0]["lr"] = 0.0
    run(params, random_grads(SHAPES, 1, torch.bfloat16), optimizer)
    assert {float(optimizer.state[param]["step"]) for param in params} == {8.0}
    assert all(map(torch.equal, map(optimizer.master_param, params), expected))


def test_stepping_within_backward_is_refused() -> None:
    """Gradient release would give each parameter a schedule of its own."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamS([param])
    param.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"within a backward pass.*after backward"):
        param.sum().backward()
    assert torch.equal(param, torch.ones(3))


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("narrow", ["exp_avg_sq", "max_exp_avg_sq", "exp_avg"])
def test_each_moment_is_read_and_written_in_its_own_dtype(backend: str, narrow: str) -> None:
    """A loaded state may have float32 and float64 side by side. What computes has the dtype of the moment whose mean is
    the schedule, max_exp_avg_sq."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
    reference = defined(params, grads, GROUPS, amsgrad=True)
    optimizer = fused(params, GROUPS, amsgrad=True, backend=backend)
    run(params, grads[:2], optimizer)
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            state[key] = state[key].to(torch.float32 if key == narrow else torch.float64)
    resumed = fused(params, GROUPS, amsgrad=True, backend=backend)
    resumed.load_state_dict(state_dict)
    run(params, grads[2:], resumed)
    assert error(params, reference.params) < 1e-7
    assert float(resumed.exp_avg_sq_mean) == pytest.approx(float(reference.exp_avg_sq_mean), rel=1e-6)
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        found = [resumed.state[param][key] for param in params]
        assert {tensor.dtype for tensor in found} == {torch.float32 if key == narrow else torch.float64}
        assert error(found, getattr(reference, key)) < 1e-7
