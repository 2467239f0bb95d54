"""Averages of weights: judged by the definition, by torch's AveragedModel and by the rule of timm's ModelEmaV3."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from swd_fused import FusedAdamS, FusedAdamW, averages
from swd_fused.state.weights import AVERAGE
from tests.device import DEVICE
from tests.runs import error, everything, moments, random_grads, random_params, run, steps_for, to_numpy

Options = dict[str, Any]
Params = list[nn.Parameter]

pytestmark = pytest.mark.usefixtures("_codes_of_small_tensors")


def averages_of(optimizer: torch.optim.Optimizer, params: Params) -> list[Tensor]:
    return moments(optimizer, params, AVERAGE)


# --- What is computed


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 30), nn.GELU(), nn.Linear(30, 3)).to(DEVICE)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[None]:
    dtype = next(net.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 6, dtype=dtype)).square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torchs_averaged_model(backend: str, dtype: torch.dtype) -> None:
    net = model().to(dtype)
    optimizer = FusedAdamW(net.parameters(), lr=1e-2, ema_decay=0.9, backend=backend)
    twin = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    twin.update_parameters(net)  # so it starts as the first weights, not as those after the first step
    for _ in train(net, optimizer, steps_for(backend, 20)):
        twin.update_parameters(net)
    for average, other in zip(averages_of(optimizer, list(net.parameters())), twin.module.parameters(), strict=True):
        torch.testing.assert_close(average, other.detach(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def timm_decay(step: int, decay: float) -> float:
    """`ModelEmaV3.get_decay` with use_warmup, warmup_gamma=9 and warmup_power=1, for which it is (step - 1) / (step +
    8): as timm's `step` is one ahead of the update that the model has taken, t + 2 is what gives (1 + t) / (10 + t)."""
    return max(min(1 - (1 + max(0, step - 1) / 9.0) ** -1.0, decay), 0.0)


def test_equals_timms_rule_with_warmup(backend: str) -> None:
    net = model().double()
    params = list(net.parameters())
    optimizer = FusedAdamW(params, lr=1e-2, ema_decay=0.5, ema_warmup=True, backend=backend)  # reached in step 8
    twins = [to_numpy(param) for param in params]
    for t, _ in enumerate(train(net, optimizer, 4 if backend == "triton" else 12), start=1):
        share = 1 - np.longdouble(timm_decay(t + 2, 0.5))
        twins = [twin + share * (to_numpy(param) - twin) for twin, param in zip(twins, params, strict=True)]
    assert error(averages_of(optimizer, params), twins) < 1e-14


PRECISIONS: list[Any] = [
    pytest.param(torch.float64, {}, id="float64"),
    pytest.param(torch.float32, {"cautious_decay": True}, id="float32"),
    pytest.param(torch.float32, {"state_dtype": "8bit", "amsgrad": True}, id="8 bits"),
    pytest.param(torch.bfloat16, {"master_weights": True}, id="remainders"),
    pytest.param(torch.bfloat16, {"master_weights": True, "amsgrad": True}, id="remainders, amsgrad"),
    pytest.param(torch.bfloat16, {"master_weights": True, "state_dtype": "8bit"}, id="remainders, 8 bits"),
    pytest.param(torch.float16, {"master_weights": True}, id="masters"),
    pytest.param(torch.float16, {}, id="float16"),
    pytest.param(torch.bfloat16, {"stochastic_rounding": True}, id="stochastic"),
    pytest.param(torch.complex64, {}, id="complex"),
]


def laid_out(dtype: torch.dtype) -> Params:
    """Also in other orders in memory, and with a tail of odd length."""
    real = [torch.randn(shape) for shape in [(300,), (24, 33), (2, 3, 4, 5), ()]]
    values = [*real, real[1].t().clone().t(), real[2].clone(memory_format=torch.channels_last)]
    return [nn.Parameter(value.to(DEVICE, dtype)) for value in values]


@pytest.mark.parametrize(("dtype", "options"), PRECISIONS)
def test_nothing_of_a_master_is_lost(backend: str, dtype: torch.dtype, options: Options) -> None:
    """The average is that of the master; of parameters without, as the update has them before it rounds them."""
    params = laid_out(dtype)
    optimizer = FusedAdamS(params, lr=1e-2, ema_decay=0.7, backend=backend, **options)
    wide = torch.promote_types(dtype, torch.float64)
    twins = [param.detach().to(wide, copy=True) for param in params]
    for _ in range(3):
        run(params, [[torch.randn_like(param) for param in params]], optimizer)
        for twin, param in zip(twins, params, strict=True):
            twin.lerp_(optimizer.master_param(param).to(wide), 0.3)
    loses = dtype.itemsize == 2 and "master_weights" not in options
    unit = torch.finfo(dtype if loses else torch.promote_types(dtype, torch.float32)).eps
    for average, twin in zip(averages_of(optimizer, params), twins, strict=True):
        assert average.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(average.to(wide), twin, rtol=4 * unit, atol=4 * unit)


# --- When it moves, and how it starts


def resumed(optimizer: FusedAdamS, params: Params, way: str, **options: Any) -> tuple[FusedAdamS, Params]:
    if way == "state dict":
        others = [nn.Parameter(param.detach().clone()) for param in params]
        other = FusedAdamS(others, **options)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return other, others
    copied: tuple[Params, FusedAdamS] = (
        copy.deepcopy((params, optimizer)) if way == "deepcopy" else pickle.loads(pickle.dumps((params, optimizer)))
    )
    return copied[1], copied[0]


@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"master_weights": True})])
def test_a_checkpoint_without_averages_starts_with_the_present_weight(dtype: torch.dtype, options: Options) -> None:
    """And so does a parameter that is added later, or a group that begins to average."""
    params = random_params([(40,), (30,)], dtype)
    old = FusedAdamS(params, **options)
    run(params, random_grads([(40,), (30,)], 3, dtype), old)
    optimizer = FusedAdamS(params[:1] + params[1:], ema_decay=0.75, **options)
    optimizer.load_state_dict(old.state_dict())
    assert optimizer.param_groups[0]["ema_decay"] == 0.75
    optimizer.add_param_group({"params": random_params([(5,)], dtype), "ema_decay": None})
    late = optimizer.param_groups[1]["params"]
    for number, group in enumerate((optimizer.param_groups[0], optimizer.param_groups[1])):
        group["ema_decay"] = 0.75
        before = [optimizer.master_param(param).double() for param in group["params"]]
        run([*params, *late], [[torch.randn_like(param) for param in (*params, *late)]], optimizer)
        for param, start in zip(group["params"], before, strict=True):
            wanted = 0.75 * start + 0.25 * optimizer.master_param(param).double()
            torch.testing.assert_close(optimizer.state[param][AVERAGE].double(), wanted, rtol=1e-6, atol=1e-7)
        assert (AVERAGE in optimizer.state[late[0]]) == bool(number)


def test_a_saved_average_is_taken_up(tmp_path: Any) -> None:
    """Its `ema_decay` with it, as other hyper-parameters; in the parameter's precision."""
    params = random_params([(40,)])
    optimizer = FusedAdamS(params, ema_decay=0.5)
    run(params, random_grads([(40,)], 2), optimizer)
    other = FusedAdamS(params)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(saved)
    assert other.param_groups[0]["ema_decay"] == 0.5
    assert torch.equal(*(averages_of(each, params)[0] for each in (optimizer, other)))
    for wrong, message in ((torch.zeros(3), r"ema_param is .* shape \(3,\), wanted"), (1.0, "is a float")):
        saved["state"][0][AVERAGE] = wrong
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(saved)
    saved["state"][0][AVERAGE] = averages_of(optimizer, params)[0].double()
    other.load_state_dict(saved)
    run(params, random_grads([(40,)], 1), other)
    assert averages_of(other, params)[0].dtype == torch.float32
    torch.optim.AdamW(params).load_state_dict(optimizer.state_dict())


# --- Exchanged


@pytest.mark.parametrize(("dtype", "options"), PRECISIONS)
def test_an_exchange_is_undone_to_the_bit(dtype: torch.dtype, options: Options) -> None:
    """And the steps that follow are those of a run without it."""
    params = laid_out(dtype)
    optimizer = FusedAdamS(params, lr=1e-2, ema_decay=0.9, **options)
    steps = [[torch.randn_like(param) for param in params] for _ in range(4)]
    with optimizer.averaged_params():  # before the first step the average is the weight
        pass
    run(params, steps[:2], optimizer)
    peer, peers = resumed(optimizer, params, "deepcopy")
    before, values = everything(optimizer, params), [average.clone() for average in averages_of(optimizer, params)]
    masters = [optimizer.master_param(param).clone() for param in params]
    with torch.inference_mode(), optimizer.averaged_params():
        for param, value in zip(params, values, strict=True):
            torch.testing.assert_close(param.detach(), value.to(dtype), rtol=2**-15, atol=0)
            if "master_weights" in options:
                assert torch.equal(optimizer.master_param(param), value)
        if dtype.itemsize > 2 or "master_weights" in options:
            assert all(map(torch.equal, averages_of(optimizer, params), masters))
    assert all(map(torch.equal, before, everything(optimizer, params)))
    for one in ((params, steps[2:], optimizer), (peers, steps[2:], peer)):
        run(*one)
    assert all(map(torch.equal, everything(optimizer, params), everything(peer, peers)))


def failing_at(number: int) -> Callable[[averages.Exchange], None]:
    apply, calls = averages.Exchange.apply, iter(range(100))

    def fail(self: averages.Exchange) -> None:
        if next(calls) == number:
            raise torch.OutOfMemoryError
        apply(self)

    return fail


@pytest.mark.usefixtures("_interrupts_are_raised")
@pytest.mark.parametrize("way", ["an error inside", "Ctrl-C inside", "no memory", "Ctrl-C on the way"])
def test_whatever_is_raised_it_is_undone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = random_params([(40,), (30,), (20,)])
    optimizer = FusedAdamS(params, ema_decay=0.9)
    run(params, random_grads([(40,), (30,), (20,)], 2), optimizer)
    before, handler = everything(optimizer, params), signal.getsignal(signal.SIGINT)
    if way == "no memory":
        monkeypatch.setattr(averages.Exchange, "apply", failing_at(1))
    elif way == "Ctrl-C on the way":
        apply = averages.Exchange.apply

        def interrupted(self: averages.Exchange) -> None:
            apply(self)
            if not seen:
                signal.raise_signal(signal.SIGINT)
            seen.append(self)

        seen: list[averages.Exchange] = []
        monkeypatch.setattr(averages.Exchange, "apply", interrupted)
    raised = {"an error inside": ZeroDivisionError, "no memory": torch.OutOfMemoryError}.get(way, KeyboardInterrupt)
    with pytest.raises(raised), optimizer.averaged_params():  # noqa: PT012
        if way == "an error inside":
            raise ZeroDivisionError
        signal.raise_signal(signal.SIGINT)
    monkeypatch.undo()
    assert all(map(torch.equal, before, everything(optimizer, params)))
    assert signal.getsignal(signal.SIGINT) is handler
    optimizer.step()


REFUSED: dict[str, Callable[[FusedAdamS], object]] = {
    "a step": lambda optimizer: optimizer.step(),
    "averaged_params()": lambda optimizer: optimizer.averaged_params().__enter__(),
    "copy_averages()": lambda optimizer: optimizer.copy_averages([]),
    "state_dict()": lambda optimizer: optimizer.state_dict(),
    "load_state_dict()": lambda optimizer: optimizer.load_state_dict({}),
    "a copy or a pickle": copy.deepcopy,
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_would_confuse_the_two_is_refused(asked: str) -> None:
    params = random_params([(40,)])
    optimizer = FusedAdamS(params, ema_decay=0.9)
    run(params, random_grads([(40,)], 2), optimizer)
    before = everything(optimizer, params)
    with optimizer.averaged_params():
        exchanged = everything(optimizer, params)
        with pytest.raises(RuntimeError, match=rf"got {asked.replace('(', '.').replace(')', '.')} within averaged_p"):
            REFUSED[asked](optimizer)
        assert all(map(torch.equal, exchanged, everything(optimizer, params)))
    assert all(map(torch.equal, before, everything(optimizer, params)))


def test_an_exchange_in_the_middle_of_a_step_is_refused() -> None:
    net = model()
    optimizer = FusedAdamW(net.parameters(), ema_decay=0.9)
    for _ in train(net, optimizer, 2):
        pass
    handle = net[0].weight.register_hook(lambda grad: optimizer.averaged_params().__enter__())
    with pytest.raises(RuntimeError, match="within a backward pass"):
        net(torch.randn(3, 6)).sum().backward()
    handle.remove()
    optimizer.release_gradients()
    net(torch.randn(3, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        optimizer.averaged_params().__enter__()
    optimizer.step()
    with optimizer.averaged_params():
        pass


def test_bad_use_is_refused() -> None:
    params = random_params([(40,), (30,)])
    plain, optimizer = FusedAdamS(params), FusedAdamS(params, ema_decay=0.9)
    with pytest.raises(RuntimeError, match="without averages of weights, wanted ema_decay"):
        plain.averaged_params().__enter__()
    run(params, random_grads([(40,), (30,)], 1), optimizer)
    for target in (params[:1], [torch.zeros(40), torch.zeros(40)], params, model()):
        with pytest.raises(ValueError, match=r"for 2 parameters, wanted another one of the same shape"):
            optimizer.copy_averages(target)
    params[1].data = torch.zeros(3)
    before = everything(optimizer, params)
    with pytest.raises(RuntimeError, match=r"shape \(3,\): .* shape \(30,\), wanted"):
        optimizer.averaged_params().__enter__()
    assert all(map(torch.equal, before, everything(optimizer, params)))
    FusedAdamS([{"params": random_params([(3,)]), "ema_decay": 0.9}], ema_warmup=True)


# --- Copied


def test_averages_are_copied_by_name_or_in_order() -> None:
    net = model()
    named = dict(net.named_parameters())
    groups: list[Options] = [
        {"params": [(name, named[name]) for name in ("2.bias", "0.weight")], "ema_decay": 0.5},
        {"params": [(name, named[name]) for name in ("2.weight", "0.bias")]},
    ]
    optimizer = FusedAdamW(groups, lr=1e-2)
    for _ in train(net, optimizer, 3):
        pass
    wanted = {name: optimizer.state[param].get(AVERAGE, param.detach()) for name, param in net.named_parameters()}
    assert not torch.equal(wanted["0.weight"], named["0.weight"])
    twin = copy.deepcopy(net).double()
    optimizer.copy_averages(twin)
    assert all(torch.equal(param, wanted[name].double()) for name, param in twin.named_parameters())
    others = [torch.zeros_like(param, dtype=torch.bfloat16) for param in optimizer.numbered_params()]
    optimizer.copy_averages(others)
    assert torch.equal(others[1], wanted["0.weight"].bfloat16())
    with pytest.raises(ValueError, match="got 0 tensors for 4 parameters"):
        optimizer.copy_averages(nn.Linear(3, 3))
