"""The same under torch.compile: whatever is done to an optimizer in a compiled function, as torch's tests do it.

"eager" is the backend with which torch runs its own optimizer tests; what the other backends make of a graph is tested
in tests/core/test_compile.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from tests.core.torch_expectations.contestants import (
    Make,
    adamw,
    assert_same,
    configs,
    contestants,
    copies,
    fresh,
    params_like,
    set_grads,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has several of its own

Params = list[torch.nn.Parameter]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_as_eager(make: Make, got: Any, wanted: Any) -> None:
    """To the bit; but AdamW's compiled step is another order of the same operations."""
    if make is adamw:
        torch.testing.assert_close(got, wanted)
    else:
        assert_same(got, wanted)


def construct(make: Make, params: Params) -> Any:
    optimizer = make(params, lr=0.01)
    optimizer.step()
    return optimizer.state_dict()


def construct_with_groups(make: Make, params: Params) -> Any:
    optimizer = make([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}])
    optimizer.step()
    return optimizer.state_dict()


def deepcopy(make: Make, params: Params) -> Any:
    optimizer = make(params)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    for mine, its in zip(params, twin.param_groups[0]["params"], strict=True):
        its.grad = mine.grad
    twin.step()
    return twin.state_dict()


def load(make: Make, params: Params) -> Any:
    optimizer = make(params)
    optimizer.step()
    other = make(params, lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    return other.state_dict()


def add_group(make: Make, params: Params) -> Any:
    optimizer = make(params[:1])
    optimizer.add_param_group({"params": params[1:], "lr": 0.1})
    optimizer.step()
    return optimizer.state_dict()


def step_with_closure(make: Make, params: Params) -> Any:
    optimizer = make(params)

    def closure() -> Tensor:
        return params[0].sum()

    return optimizer.step(closure).detach(), optimizer.state_dict()


def schedule(make: Make, params: Params) -> Any:
    optimizer = make(params, lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    return optimizer.state_dict()


def zero_gradients(make: Make, params: Params) -> Any:
    optimizer = make(params)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return optimizer.state_dict()


SCENARIOS: list[Callable[[Make, Params], Any]] = [
    construct,
    construct_with_groups,
    deepcopy,
    load,
    add_group,
    step_with_closure,
    schedule,
    zero_gradients,
]


@pytest.mark.thinned
@contestants
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_whole_functions(make: Make, scenario: Callable[[Make, Params], Any]) -> None:
    """Compiled they leave the parameters and the state that they leave uncompiled."""
    params = params_like((4,), (3, 2))
    twins = copies(params)
    set_grads(params, 0)
    set_grads(twins, 0)
    wanted = scenario(make, twins)
    got = torch.compile(scenario, backend="eager")(make, params)
    assert_as_eager(make, got, wanted)
    assert_as_eager(make, params, twins)


@pytest.mark.thinned
@contestants
@configs
def test_steps(make: Make, config: dict[str, Any]) -> None:
    params = params_like((4,), (3, 2))
    twins = copies(params)
    optimizer, eager = make(params, **fresh(config)), make(twins, **fresh(config))
    step = torch.compile(optimizer.step, backend="eager")
    for seed in range(3):
        set_grads(params, seed)
        step()
    train(twins, eager, 3, seed=0)
    assert_as_eager(make, params, twins)


@contestants
def test_loading_in_a_compiled_function(make: Make) -> None:
    """Into an optimizer that was made outside, and has steps behind it."""
    params = params_like((4,), (3, 2))
    optimizer = make(params)
    train(params, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    train(params, optimizer, 3)
    torch.compile(lambda: optimizer.load_state_dict(saved), backend="eager")()
    assert_same(optimizer.state_dict()["state"], saved["state"])
    train(params, optimizer, 1)
    assert float(optimizer.state[params[0]]["step"]) == 2


@contestants
def test_hooks_around_a_compiled_step(make: Make) -> None:
    params = params_like((4,))
    optimizer = make(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    set_grads(params, 0)
    torch.compile(optimizer.step, backend="eager")()
    assert seen == ["pre", "post"]


@contestants
def test_a_compiled_training_step(make: Make) -> None:
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    results = []
    for model, way in zip(models, (lambda f: f, lambda f: torch.compile(f, backend="eager")), strict=True):
        optimizer = make(model.parameters(), lr=0.1)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = way(step)
        results.append([run() for _ in range(3)])
    torch.testing.assert_close(results[0], results[1])
    assert results[0][-1] < results[0][0]
