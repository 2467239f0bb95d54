"""What torch's own tests expect of every optimizer, written anew, with AdamW as the yardstick: what AdamW does not meet
is no expectation of torch's.

torch's test files are not in its wheel. Its `OptimizerInfo` machinery is, but needs `expecttest`, which torch does not
bring. What other files here test of all backends is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as lrs
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from swd_fused import FusedAdamS, FusedAdamW
from tests.runs import assert_same, twins_of

Params = list[torch.nn.Parameter]
Make = Callable[..., torch.optim.Optimizer]


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"weight_decay": 5e-4, **options})


def by_cpp(params: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedAdamS(params, **{"backend": "cpu", **options})


def by_torch(params: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedAdamS(params, **{"backend": "torch", **options})


contestants = pytest.mark.parametrize(
    "make",
    [
        pytest.param(adamw, id="AdamW", marks=pytest.mark.slow),  # whether these are torch's expectations
        pytest.param(by_cpp, id="cpu"),
        pytest.param(by_torch, id="torch"),
        pytest.param(FusedAdamW, id="FusedAdamW"),
    ],
)


def params_like(*shapes: tuple[int, ...], seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_grads(params: Params, seed: int) -> None:
    for param, grad in zip(params, params_like(*(p.shape for p in params), seed=seed), strict=True):
        param.grad = grad.detach()


def train(params: Params, optimizer: torch.optim.Optimizer, steps: int, seed: int = 100) -> None:
    for step in range(steps):
        set_grads(params, seed + step)
        optimizer.step()


# --- Steps


@contestants
@pytest.mark.parametrize("under", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_closure(make: Make, under: Callable[[], Any]) -> None:
    """Runs once, with gradients enabled whatever is around; its result is returned, and the mode is as before."""
    param = params_like((4,))[0]
    optimizer = make([param])
    enabled = []

    def closure() -> Tensor:
        enabled.append(torch.is_grad_enabled())
        if under is torch.inference_mode:
            param.grad = torch.ones(4)
            return torch.tensor(7.0)
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with under():
        mode = torch.is_grad_enabled()
        loss = optimizer.step(closure)
        assert torch.is_grad_enabled() == mode
    assert enabled == [True]
    assert isinstance(loss, Tensor)


@contestants
@pytest.mark.parametrize("steps_before", [0, 1])
def test_between_inference_mode_and_none(make: Make, steps_before: int) -> None:
    """State that was made outside serves inside. State that was made inside serves outside: more than AdamW's does."""
    params = params_like((4,), (3, 2))
    twins = twins_of(params)
    optimizer = make(params)
    train(params, optimizer, steps_before)
    with torch.inference_mode():
        train(params, optimizer, 1, seed=100 + steps_before)
        if make is not adamw:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if make is adamw and not steps_before:
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            train(params, optimizer, 1)
        return
    train(params, optimizer, 2, seed=101 + steps_before)
    train(twins, make(twins), 3 + steps_before)
    assert_same(params, twins)


@contestants
def test_step_hooks(make: Make) -> None:
    """In torch's order; and one before the step may replace its arguments."""
    params = params_like((4,))
    optimizer = make(params)
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("global post")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        train(params, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["global pre", "pre", "post", "global post"]
    train(params, optimizer, 1)
    assert len(seen) == 4
    optimizer.register_step_pre_hook(lambda own, args, kwargs: ((own, lambda: 7.0), kwargs))
    assert optimizer.step() == 7.0


# --- States


@contestants
def test_a_state_dict_is_of_one_step(make: Make) -> None:
    """Whether it follows the optimizer or not: the step count fits the moments, also later and also elsewhere."""
    params = params_like((4,))
    optimizer = make(params)
    at_step = {}
    train(params, optimizer, 1)
    saved = optimizer.state_dict()
    for step in range(1, 4):
        at_step[step] = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
        train(params, optimizer, 1, seed=step)
    at_step[4] = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    other = make(twins_of(params))
    other.load_state_dict(saved)
    for state in (saved["state"][0], other.state[other.param_groups[0]["params"][0]]):
        assert_same(dict(state), at_step[int(state["step"])])


@contestants
@pytest.mark.parametrize("number", [int, float, torch.tensor])
def test_older_state_dicts(make: Make, number: Any) -> None:
    """Without keys that came later, and with step counts that are numbers."""
    params = params_like((4,), (3, 2))
    optimizer = make(params)
    train(params, optimizer, 2)
    twins = twins_of(params)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused"):
            group.pop(key, None)
    for state in saved["state"].values():
        state["step"] = number(int(state["step"]))
    other = make(twins)
    other.load_state_dict(saved)
    for own, its in ((params, optimizer), (twins, other)):
        train(own, its, 2)
    assert_same(params, twins)


@contestants
def test_hooks_of_state_dicts(make: Make) -> None:
    params = params_like((4,))
    optimizer, other = make(params), make(twins_of(params))
    train(params, optimizer, 1)
    seen: list[str] = []

    def with_another_lr(own: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.25
        return state_dict

    optimizer.register_state_dict_pre_hook(lambda own: seen.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda own: seen.append("first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda own, state_dict: {**state_dict, "note": 1})
    optimizer.register_state_dict_post_hook(lambda own, state_dict: seen.append("post"))
    other.register_load_state_dict_pre_hook(with_another_lr)
    other.register_load_state_dict_pre_hook(lambda own, state_dict: seen.append("first of load"), prepend=True)
    other.register_load_state_dict_post_hook(lambda own: seen.append(f"loaded {own.param_groups[0]['lr']}"))
    saved = optimizer.state_dict()
    assert saved.pop("note") == 1
    other.load_state_dict(saved)
    assert seen == ["first", "pre", "post", "first of load", "loaded 0.25"]
    assert optimizer.param_groups[0]["lr"] == 1e-3


@contestants
def test_named_parameters(make: Make) -> None:
    """Names are kept and saved, and those of the optimizer that loads stay, as with AdamW."""
    optimizer, adamws = (kind(iter(zip("ab", params_like((4,), (3,)), strict=True))) for kind in (make, adamw))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["a", "b"]
    for names in ("cd", None):
        found = []
        for kind, source in ((make, optimizer), (adamw, adamws)):
            params = params_like((4,), (3,))
            other = kind(params if names is None else list(zip(names, params, strict=True)))
            other.load_state_dict(source.state_dict())
            found.append(other.param_groups[0].get("param_names"))
        assert found[0] == found[1]


# --- Schedulers

STEPS = 12

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "LinearLR to zero": lambda o: lrs.LinearLR(o, start_factor=1 / 3, end_factor=0.0, total_iters=4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, mode="triangular2"),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)], [3]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
}


def scheduled(make: Make, name: str, lr: Any, params: Params) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "lr": lr(3e-3)}], lr=lr(1e-2))
    return optimizer, SCHEDULERS[name](optimizer)


def advance(params: Params, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[Any]:
    """Returns the hyper-parameters after each step."""
    seen = []
    for step in steps:
        set_grads(params, step)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        seen.append([(float(group["lr"]), *map(float, group["betas"])) for group in optimizer.param_groups])
    return seen


@pytest.mark.thinned
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR steps its schedulers with an epoch
@contestants
@pytest.mark.parametrize("new_lr", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_what_they_set_for_adamw_and_resume(make: Make, name: str, new_lr: Any) -> None:
    """Learning rates and, where momentum cycles, betas; tensors stay the tensors that they are."""
    params, peers = params_like((5,), (3, 2)), params_like((5,), (3, 2))
    optimizer, scheduler = scheduled(make, name, new_lr, params)
    seen = advance(params, optimizer, scheduler, range(STEPS // 2))
    twins = twins_of(params)
    other, other_scheduler = scheduled(make, name, new_lr, twins)
    other_scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    later = advance(params, optimizer, scheduler, range(STEPS // 2, STEPS))
    assert seen + later == advance(peers, *scheduled(adamw, name, new_lr, peers), range(STEPS))
    assert later == advance(twins, other, other_scheduler, range(STEPS // 2, STEPS))
    assert_same(params, twins)
    assert all(isinstance(group["lr"], Tensor) == (new_lr is torch.tensor) for group in optimizer.param_groups)
    assert all(param.isfinite().all() for param in params)
