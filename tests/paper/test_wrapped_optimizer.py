"""`ScheduledWeightDecay` used like the optimizer that it wraps: scalers, schedulers, state dicts, refusals."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS, ScheduledWeightDecay
from tests.paper.test_scheduled_weight_decay import fused_adam, wrapped
from tests.runs import SHAPES, random_grads, random_params, run


class Averaging(torch.optim.SGD):
    """An optimizer with more than torch's methods, as those that are free of schedules have."""

    is_training = False
    max_decay = "its own"

    def train(self) -> None:
        self.is_training = True


def test_what_it_lacks_is_the_wrapped_optimizers() -> None:
    optimizer = ScheduledWeightDecay(Averaging(random_params([(2,)]), lr=0.1))
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not one.is_training
        one.train()
        assert one.is_training
        assert one.optimizer.is_training
        assert one.param_groups is one.optimizer.param_groups
        with pytest.raises(AttributeError, match="'Averaging' object has no attribute 'eval'"):
            one.eval()
        with pytest.raises(AttributeError, match="'ScheduledWeightDecay' object has no attribute '_private'"):
            _ = one._private
    with pytest.raises(AttributeError, match="'optimizer'"):
        _ = ScheduledWeightDecay.__new__(ScheduledWeightDecay).optimizer


def test_grad_scaler_does_not_take_it_for_a_fused_optimizer() -> None:
    """GradScaler leaves the scale in gradients if `_step_supports_amp_scaling`."""
    params = random_params([(40,)], torch.float64)
    twins = copy.deepcopy(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [ScheduledWeightDecay(fused_adam(list_), 1e-2) for list_ in (params, twins)]
    for (grad,) in random_grads([(40,)], 5, torch.float64):
        scaler.scale((params[0] * grad).sum()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        twins[0].grad = grad.clone()
        optimizers[1].step()
    torch.testing.assert_close(params, twins, rtol=1e-12, atol=1e-13)


def test_learning_rate_schedulers_and_closures_work() -> None:
    params = random_params([(4,)])
    optimizer = ScheduledWeightDecay(torch.optim.Adam(params, lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    def closure() -> float:
        params[0].grad = torch.ones(4)
        return 5.0

    assert optimizer.step(closure) == 5.0
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer.zero_grad()
    assert params[0].grad is None
    assert optimizer.state[params[0]]["step"] == 1


def test_a_tensor_learning_rate_is_followed() -> None:
    params = random_params([(4,)], torch.float64)
    twins = copy.deepcopy(params)
    lr = torch.tensor(1e-2)
    optimizer = ScheduledWeightDecay(torch.optim.Adam(params, lr=lr, foreach=False, capturable=False), 1e-2)
    twin = ScheduledWeightDecay(torch.optim.Adam(twins, lr=1e-2), 1e-2)
    for factor in (1.0, 0.5):
        lr.mul_(factor)
        twin.param_groups[0]["lr"] *= factor
        grads = random_grads([(4,)], 1, torch.float64)
        run(params, grads, optimizer)
        run(twins, grads, twin)
    torch.testing.assert_close(params[0], twins[0], rtol=1e-7, atol=1e-8)


def same(params: list[torch.nn.Parameter], expected: list[Tensor]) -> bool:
    return all(torch.equal(param, other) for param, other in zip(params, expected, strict=True))


def sgd(params: list[torch.nn.Parameter]) -> ScheduledWeightDecay:
    """Has no second moments of its own."""
    return ScheduledWeightDecay(torch.optim.SGD(params, lr=0.1, momentum=0.9), 1e-2)


@pytest.mark.parametrize("build", [wrapped, sgd])
def test_resumed_runs_and_copies_have_the_same_bits(build: Any) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 20)
    first = build(params)
    run(params, grads[:10], first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    loaded = build(copy.deepcopy(params))
    loaded.load_state_dict(torch.load(file, weights_only=True))
    others = [loaded, copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    run(params, grads[10:], first)
    for other in others:
        own = [param for group in other.param_groups for param in group["params"]]
        assert other.param_groups is other.optimizer.param_groups
        run(own, grads[10:], other)
        assert same(own, [param.detach() for param in params])


@pytest.mark.parametrize("what", ["pickled", "state_dict"])
def test_what_0_2_saved_goes_on(what: str) -> None:
    """The file has the bytes that 0.2.0 saved after three steps, the parameters then, and after three steps more."""
    saved = torch.load(Path(__file__).parent / "saved_by_0_2" / "wrapped.pt", weights_only=True)
    if what == "pickled":
        optimizer = pickle.loads(saved["pickled"])
    else:
        first, second = (torch.nn.Parameter(param) for param in saved["before"])
        sgd = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
        optimizer = ScheduledWeightDecay(sgd, 1e-9)
        optimizer.load_state_dict(torch.load(io.BytesIO(saved["state_dict"])))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(3, 6):
        generator = torch.Generator().manual_seed(100 + step)
        run(params, [[torch.randn(param.shape, generator=generator) for param in params]], optimizer)
    assert same(params, saved["after"])


def test_adams_state_is_taken_over_and_given_back() -> None:
    """A run that begins as plain Adam: the averages follow from its second moments."""
    params = random_params([(9,), (2, 2)], torch.float64)
    grads = random_grads([(9,), (2, 2)], 20, torch.float64)
    adam = torch.optim.Adam(params, weight_decay=0.0)
    run(params, grads[:10], adam)
    twins = copy.deepcopy(params)
    own = ScheduledWeightDecay(torch.optim.Adam(params), 1e-2)
    own.load_state_dict(adam.state_dict())
    other = FusedAdamS(twins, weight_decay=1e-2)
    with pytest.warns(UserWarning, match="for Adam's L2 regularization"):
        other.load_state_dict(adam.state_dict())
    run(params, grads[10:], own)
    run(twins, grads[10:], other)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-13, atol=1e-13)
    torch.optim.Adam(params).load_state_dict(own.state_dict())


@pytest.mark.parametrize("has_steps", [True, False])
def test_averages_that_begin_anew_say_so(has_steps: bool) -> None:
    params = random_params([(9,), (4,)])
    plain = torch.optim.RMSprop(params)
    if has_steps:
        run(params, [[torch.ones(9), None]], plain)
    own = ScheduledWeightDecay(torch.optim.RMSprop(params))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.load_state_dict(plain.state_dict())
    assert ["for 1 parameters, exp_avg_sq" in str(warning.message) for warning in caught] == [True] * has_steps
    assert all(warning.filename == __file__ for warning in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.load_state_dict(own.state_dict())


@pytest.mark.parametrize("name", ["exp_avg_sq", "variance_ma"])
def test_second_moments_and_steps_are_found_where_others_keep_them(name: str) -> None:
    params = random_params([(9,)], torch.float64)
    own = ScheduledWeightDecay(torch.optim.SGD(params, lr=0.1))
    saved = torch.optim.SGD(params, lr=0.1).state_dict()
    saved["state"][0] = {name: torch.full((9,), 0.5, dtype=torch.float64)}
    saved["param_groups"][0]["step"] = 3
    own.load_state_dict(saved)
    assert own.state_dict()["averages"] == {0: {"exp_avg_sq_sum": torch.tensor(4.5), "step": 3}}


# --- Refusals


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: ScheduledWeightDecay(torch.nn.Linear(1, 1)), "wanted a torch optimizer"),
        (lambda p: ScheduledWeightDecay(torch.optim.LBFGS(p)), "LBFGS"),
        (lambda p: ScheduledWeightDecay(torch.optim.Adam(p), weight_decay=-1), "weight_decay"),
        (lambda p: ScheduledWeightDecay(torch.optim.Adam(p), max_decay=0), "max_decay"),
        (lambda p: ScheduledWeightDecay(torch.optim.Adam(p), weight_decay=None), "no group decays"),
    ],
)
def test_what_cannot_work_is_refused(build: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build(random_params([(2,)]))


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = ScheduledWeightDecay(torch.optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
