"""What torch's tests expect and FusedAdamS deliberately does otherwise: each line of the table in docs/migrating.md."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from swd_fused import FusedAdamS
from tests.core.torch_expectations.contestants import Make, adamw, assert_same, by_cpp, by_torch, copies, params_like

ours = pytest.mark.parametrize("make", [pytest.param(by_cpp, id="cpu"), pytest.param(by_torch, id="torch")])


class Difference(NamedTuple):
    expected: str
    here: str
    reason: str


NOT_MET = {
    "unscaled": Difference(
        "after `scaler.step(optimizer)` `.grad` is unscaled",
        "stays scaled, unless `scaler.unscale_(optimizer)` was called",
        "the step unscales in registers, and writes no gradient back; `optimizer.grad_norm` is that of unscaled ones",
    ),
    "flags": Difference(
        "`foreach` and `fused` choose an implementation",
        "accepted, without effect; `backend` chooses",
        "there is one implementation for each device",
    ),
    "differentiable": Difference(
        "a step can be differentiated (`differentiable=True`)", "refused", "parameters are written in place by kernels"
    ),
    "duplicates": Difference(
        "a parameter that is twice in a group is stepped twice, with a warning",
        "refused",
        "the second update would start from the first one's result, and the mean would count it twice",
    ),
    "backward": Difference(
        "a step may be taken in the backward pass, by a hook for each parameter",
        "refused with an explanation; `release_gradients()` does so, with a lagged schedule or none",
        "the mean over the model is not known before all gradients are",
    ),
    "zero gradients": Difference(
        "a step with zero gradients decays weights",
        "as long as no other gradient has been seen nothing decays",
        "the schedule divides by the rms gradient; loaders of checkpoints take such a step to make the state",
    ),
    "state dtype": Difference(
        "moments have the parameter's dtype, and loading casts them to it",
        "float32 at least, and loading never narrows",
        "a bfloat16 second moment stalls",
    ),
    "sharing": Difference(
        "`load_state_dict` may go on sharing memory with the dict that was loaded",
        "it copies",
        "two optimizers would write to one state",
    ),
}


def test_the_page_has_the_table() -> None:
    """Printed by: python -c "from tests.core.torch_expectations.test_not_met import table; print(table())" """
    page = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
    assert table() in page


def table() -> str:
    rows = [f"| {line.expected} | {line.here} | {line.reason} |" for line in NOT_MET.values()]
    return "\n".join(["| torch's tests expect | here | why |", "|---|---|---|", *rows])


def scaled(make: Make, unscale: bool) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer, scaler = make(params), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(params[0].sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert params[0].grad is not None
    return params[0].grad, optimizer


@ours
def test_gradients_stay_scaled(make: Make) -> None:
    for fused in (False, True):
        assert_same(scaled(partial(adamw, fused=fused), unscale=False)[0], torch.ones(3))
    for unscale, wanted in ((False, 8.0), (True, 1.0)):
        grad, optimizer = scaled(make, unscale)
        assert_same(grad, torch.full((3,), wanted))
        assert isinstance(optimizer, FusedAdamS)
        assert float(optimizer.grad_norm) == pytest.approx(3**0.5)  # what there is for code that wants the norm


@ours
def test_flags_that_choose_an_implementation(make: Make) -> None:
    results = []
    for options in ({}, {"foreach": True}, {"fused": True}):
        params = [torch.nn.Parameter(torch.ones(3))]
        optimizer = make(params, **options)
        params[0].grad = torch.arange(3.0)
        optimizer.step()
        results.append(params[0].detach())
    assert_same(results[1:], [results[0]] * 2)
    with pytest.raises(ValueError, match="differentiable"):
        make(params_like((3,)), differentiable=True)


@ours
def test_a_parameter_twice_in_one_group(make: Make) -> None:
    params = params_like((4,))
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        adamw([*params, *params])
    with pytest.raises(ValueError, match=r"twice|duplicate"):
        make([*params, *params])


@ours
def test_a_step_has_no_derivative(make: Make) -> None:
    results = {}
    for name, kind in (("AdamW", lambda p: adamw(p, differentiable=True, foreach=False)), ("ours", make)):
        start = torch.ones(3, requires_grad=True)
        param = start.clone() if name == "AdamW" else torch.nn.Parameter(start.detach().clone())
        optimizer = kind([torch.nn.Parameter(torch.zeros(3))])
        optimizer.param_groups[0]["params"][0] = param
        param.grad = torch.ones(3)
        optimizer.step()
        results[name] = param.requires_grad and param.grad_fn is not None
    assert results == {"AdamW": True, "ours": False}


@ours
def test_no_step_in_the_backward_pass(make: Make) -> None:
    for kind in (adamw, make):
        param = params_like((3,))[0]
        optimizer = kind([param])
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        start = copies([param])[0]
        if kind is adamw:
            param.sum().backward()
            assert not torch.equal(param, start)
            continue
        with pytest.raises(RuntimeError, match="called within a backward pass"):
            param.sum().backward()
        assert torch.equal(param, start)


@ours
def test_zero_gradients_decay_nothing(make: Make) -> None:
    for kind, moves in ((adamw, True), (make, False)):
        param = torch.nn.Parameter(torch.ones(3))
        param.grad = torch.zeros(3)
        kind([param], weight_decay=0.1).step()
        assert (param != 1).all() == moves


@ours
def test_moments_are_wide(make: Make) -> None:
    for kind, dtype in ((adamw, torch.bfloat16), (make, torch.float32)):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        optimizer = kind([param])
        optimizer.step()
        assert optimizer.state[param]["exp_avg_sq"].dtype == dtype
        wide = {0: {key: value.float() for key, value in optimizer.state[param].items()}}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": wide})
        assert optimizer.state[param]["exp_avg_sq"].dtype == dtype


@ours
def test_loading_copies(make: Make) -> None:
    for kind, shared in ((adamw, True), (make, False)):
        params = params_like((3,))
        optimizer, other = kind(params), kind(copies(params))
        params[0].grad = torch.ones(3)
        optimizer.step()
        saved = optimizer.state_dict()
        other.load_state_dict(saved)
        loaded = other.state[other.param_groups[0]["params"][0]]
        assert (loaded["exp_avg"].data_ptr() == saved["state"][0]["exp_avg"].data_ptr()) == shared
