"""A step that cannot be taken is refused before anything is written, in any bucket, and the run goes on after it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.device import DEVICE
from tests.runs import assert_same, random_grads, random_params, run

SHAPES = [(50,), (20, 30)]
AMSGRAD, MASTERS = {"amsgrad": True}, {"master_weights": True}
CODED = {"state_dtype": "8bit"}

Params = list[torch.nn.Parameter]
Spoil = Callable[[FusedAdamS, torch.nn.Parameter], object]


class GradientElsewhere(torch.nn.Parameter):
    """What moving a parameter's data between backward and step leaves behind; without a GPU torch forbids it."""

    @property
    def grad(self) -> Tensor:
        return torch.ones(self.shape, device="meta")


def gradient(change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(_: FusedAdamS, param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        grad, param.grad, param.grad_dtype = param.grad, None, None  # of any dtype
        param.grad = change(grad)

    return spoil


def freed(grad: Tensor) -> Tensor:
    grad.untyped_storage().resize_(0)
    return grad


def gradient_on_another_device(_: FusedAdamS, param: torch.nn.Parameter) -> None:
    param.__class__ = GradientElsewhere


def gradient_of_another_shape(_: FusedAdamS, param: torch.nn.Parameter) -> None:
    data, param.grad = param.data, None
    param.data = torch.zeros(5, 4)
    param.grad = torch.ones(5, 4)
    param.data = data


def parameter(change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(_: FusedAdamS, param: torch.nn.Parameter) -> None:
        param.grad = None
        param.data = change(param.data)
        param.grad = torch.ones_like(param)

    return spoil


def state(key: str, change: Callable[[Tensor], Any]) -> Spoil:
    def spoil(optimizer: FusedAdamS, param: torch.nn.Parameter) -> None:
        optimizer.state[param][key] = change(optimizer.state[param][key])

    return spoil


def cut_short(key: str) -> Spoil:
    """At the same address. What lies behind it may be somebody else's."""

    def spoil(optimizer: FusedAdamS, param: torch.nn.Parameter) -> None:
        tensor = optimizer.state[param][key]
        tensor.data = tensor.data[:7]

    return spoil


def missing_moment(optimizer: FusedAdamS, param: torch.nn.Parameter) -> None:
    del optimizer.state[param]["exp_avg_sq"]


class Refusal(NamedTuple):
    spoil: Spoil
    message: str
    options: dict[str, Any] = {}  # noqa: RUF012  # never written to
    dtype: torch.dtype = torch.float32


GRADIENTS = {
    "sparse": Refusal(gradient(Tensor.to_sparse), r"sparse_coo gradient of shape \(20, 30\).*wanted a dense one"),
    "freed": Refusal(gradient(freed), "whose memory was freed"),
    "float8": Refusal(gradient(lambda grad: grad.to(torch.float8_e4m3fn)), "FusedAdamS got a .*float8_e4m3fn"),
    "elsewhere": Refusal(gradient_on_another_device, "on meta for a parameter .* on .*, wanted one on the parameter's"),
    "another shape": Refusal(
        gradient_of_another_shape, r"gradient of shape \(5, 4\).*\(20, 30\).*wanted one of the par"
    ),
}
STATE = {
    "resized parameter": Refusal(parameter(lambda x: torch.ones(9)), r"shape \(9,\): .* shape \(20, 30\), wanted"),
    "parameter cut short": Refusal(parameter(lambda x: x[:15]), r"shape \(15, 30\): .* shape \(20, 30\), wanted"),
    "missing moment": Refusal(missing_moment, "has step, exp_avg, but no exp_avg_sq.*del optimizer.state"),
    "state elsewhere": Refusal(state("exp_avg", lambda x: x.to("meta")), "exp_avg is on meta, wanted it on"),
    "another view": Refusal(
        state("exp_avg_sq", lambda x: x.view(10, 60)), r"shape \(10, 60\), wanted .* shape \(20, 30\)"
    ),
    **{
        f"step {value}": Refusal(state("step", lambda _, value=value: value), "step is .*wanted a whole number >= 0")
        for value in (-1, 1.5, float("nan"), True, "3", None, torch.ones(2), torch.tensor(-1.0))
    },
    "no moment": Refusal(state("exp_avg", lambda _: 3), "exp_avg is a int, wanted a dense tensor"),
    "None": Refusal(state("exp_avg_sq", lambda _: None), "exp_avg_sq is a NoneType, wanted a dense tensor"),
    "scales": Refusal(
        state("exp_avg_scales", lambda x: torch.zeros(20, 3)), r"shape \(20, 3\), wanted .* \(20, 1\)", CODED
    ),
    **{
        f"{key} of {dtype}": Refusal(
            state(key, lambda x, dtype=dtype: x.to(dtype)), f"{key} is a .* of {dtype} .*, wanted", CODED
        )
        for key, dtype in (
            ("exp_avg_codes", torch.float32),
            ("exp_avg_sq_root_codes", torch.int8),
            ("exp_avg_scales", torch.bfloat16),
        )
    },
    "remainder of int32": Refusal(
        state("master_remainder", lambda x: x.int()), "of torch.int32 .*, wanted .*torch.int16", MASTERS, torch.bfloat16
    ),
    **{
        f"{key} cut short": Refusal(cut_short(key), "FusedAdamS cannot continue .*del optimizer.state", options, dtype)
        for key, options, dtype in (
            ("exp_avg", {}, torch.float32),
            ("exp_avg_sq", {}, torch.float32),
            ("max_exp_avg_sq", AMSGRAD, torch.float32),
            ("master_param", MASTERS, torch.float16),
            ("master_remainder", MASTERS, torch.bfloat16),
            *((key, CODED, torch.float32) for key in ("exp_avg_codes", "exp_avg_scales")),
            *((key, CODED, torch.float32) for key in ("exp_avg_sq_root_codes", "exp_avg_sq_root_scales")),
        )
    },
}


def new_run(backend: str, options: dict[str, Any], dtype: torch.dtype, steps: int) -> tuple[Params, FusedAdamS]:
    """Two buckets, of which the first one is well."""
    params = random_params(SHAPES, dtype)
    own = {name: value for name, value in options.items() if name in ("amsgrad", "state_dtype")}
    others = {name: value for name, value in options.items() if name not in own}
    groups = [{"params": params[:1], "amsgrad": "amsgrad" not in own}, {"params": params[1:], **own}]
    optimizer = FusedAdamS(groups, lr=0.1, backend=backend, **others)
    run(params, random_grads(SHAPES, steps, dtype), optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    return params, optimizer


def everything(optimizer: FusedAdamS, params: Params) -> Any:
    """Also what lies behind tensors that were cut short."""
    states = [optimizer.state.get(param, {}) for param in params]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.is_cpu]
    storages = [torch.tensor(tensor.untyped_storage()) for tensor in (*params, *tensors)]
    return storages, [list(state) for state in states], [id(value) for state in states for value in state.values()]


def assert_refused(optimizer: FusedAdamS, params: Params, message: str) -> None:
    before = everything(optimizer, params)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same(everything(optimizer, params), before)


@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"decay": "decoupled"}], ids=str)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("bad", GRADIENTS)
def test_gradients(backend: str, bad: str, steps_before: int, options: dict[str, Any]) -> None:
    """Where there is no pass 1, nothing else has looked at them before the first bucket is updated."""
    refusal = GRADIENTS[bad]
    params, optimizer = new_run(backend, options, refusal.dtype, steps_before)
    refusal.spoil(optimizer, params[1])
    assert_refused(optimizer, params, refusal.message)


@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
@pytest.mark.parametrize("bad", STATE)
def test_state(backend: str, bad: str, schedule: str) -> None:
    refusal = STATE[bad]
    params, optimizer = new_run(backend, {"schedule": schedule, **refusal.options}, refusal.dtype, steps=2)
    refusal.spoil(optimizer, params[1])
    assert_refused(optimizer, params, refusal.message)


def test_a_parameter_resized_before_the_first_step_is_as_any_other() -> None:
    params, optimizer = new_run("cpu", {}, torch.float32, steps=0)
    STATE["resized parameter"].spoil(optimizer, params[1])
    optimizer.step()
    assert (params[1] < 1).all()


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_first_step_that_is_refused_leaves_no_state(backend: str, schedule: str) -> None:
    """Zero state would count as a step that was taken, and the next lagged step would have a mean of 0."""
    params, optimizer = new_run(backend, {"schedule": schedule}, torch.float32, steps=0)
    others, untouched = copy.deepcopy((params, optimizer))
    GRADIENTS["freed"].spoil(optimizer, params[1])
    assert_refused(optimizer, params, "freed")
    assert len(optimizer.state) == 0
    grads = random_grads(SHAPES, 2)
    run(params, grads, optimizer)
    run(others, grads, untouched)
    assert all(map(torch.equal, params, others))


@pytest.mark.backends(split=True)
def test_lagged_after_a_step_that_was_refused(backend: str) -> None:
    """It took no step, whichever parameters had a gradient in it."""
    params, optimizer = new_run(backend, {"schedule": "lagged"}, torch.float64, steps=2)
    others, untouched = copy.deepcopy((params, optimizer))
    moment, optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"], torch.zeros(3).double()
    params[1].grad = None
    assert_refused(optimizer, params, "cannot continue the state")
    optimizer.state[params[0]]["exp_avg"] = moment
    grads = random_grads(SHAPES, 1, torch.float64)
    run(params, grads, optimizer)
    run(others, grads, untouched)
    torch.testing.assert_close(optimizer.exp_avg_sq_mean, untouched.exp_avg_sq_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(params, others, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("dtype", "key"), [(torch.bfloat16, "master_remainder"), (torch.float16, "master_param")])
def test_masters_follow_after_a_step_that_was_refused(backend: str, dtype: torch.dtype, key: str) -> None:
    params, optimizer = new_run(backend, MASTERS, dtype, steps=1)
    with torch.no_grad():
        params[0].fill_(7.0)
    value = params[1].data
    parameter(lambda x: torch.full((1,), 3.0, dtype=dtype))(optimizer, params[1])
    assert_refused(optimizer, params, r"shape \(1,\): .* shape \(20, 30\), wanted")
    parameter(lambda x: value)(optimizer, params[1])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert key in optimizer.state[params[0]]
    tolerance = 2**-6 if dtype == torch.bfloat16 else 0  # half of the last place, which remainders keep
    torch.testing.assert_close(optimizer.master_param(params[0]), torch.full((50,), 7.0), rtol=0, atol=tolerance)


def test_a_warning_that_is_an_error_comes_before_the_update(backend: str) -> None:
    params = random_params([(20,)])
    optimizer = FusedAdamS(params, lr=0.1, weight_decay=100.0, backend=backend)
    params[0].grad = torch.full((20,), 1e-3)
    optimizer.step()
    before = everything(optimizer, params)
    if DEVICE != "cpu":
        torch.cuda.synchronize()  # a step does not wait for what the one before has found
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="max_decay"):
            optimizer.step()
        assert_same(everything(optimizer, params), before)
        optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 2
