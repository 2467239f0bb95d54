"""Steps: where they go, on what tensors, and what is called around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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


@pytest.mark.thinned
@contestants
@configs
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("schedulers", [(), (StepLR,), (StepLR, ReduceLROnPlateau)], ids=len)
def test_goes_in_the_right_direction(
    make: Make, config: dict[str, Any], contiguous: bool, schedulers: tuple[Any, ...]
) -> None:
    weight, bias, values = (p.detach() for p in params_like((10, 5), (10,), (5,)))
    if not contiguous:
        weight, bias = torch.stack([weight, weight], -1)[..., 0], torch.stack([bias, bias], -1)[..., 0]
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    optimizer = make([weight, bias], **fresh(config))
    ways = [kind(optimizer, *([10] if kind is StepLR else [])) for kind in schedulers]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight.mv(values) + bias).square().sum()
        loss.backward()
        return loss

    before = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        for way in ways:
            way.step(*([loss.item()] if isinstance(way, ReduceLROnPlateau) else []))
    after = closure().item()
    assert after > before if config.get("maximize") else after < before


@contestants
@configs
def test_groups_have_their_own_hyper_parameters(make: Make, config: dict[str, Any]) -> None:
    """A group of its own with lr=0 stands still; the others move as they do without it."""
    params = params_like((4,), (3,), (2, 2))
    twins = copies(params)
    start = copies(params)
    options = {**fresh(config), "weight_decay": 0.0}  # or the schedule would couple them
    optimizer = make([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], **options)
    train(params, optimizer, 3)
    train(twins, make(twins, **{**fresh(config), "weight_decay": 0.0}), 3)
    assert_same(params[0], start[0])
    assert_same(params[1:], twins[1:])


@contestants
def test_a_group_with_another_weight_decay(make: Make) -> None:
    params = params_like((4,), (4,))
    twins = copies(params)
    train(params, make([{"params": params[0], "weight_decay": 0.0}, {"params": params[1]}], weight_decay=0.1), 2)
    train(twins, make(twins, weight_decay=0.0), 2)
    assert torch.equal(params[0], twins[0])
    assert not torch.equal(params[1], twins[1])


@contestants
@configs
def test_maximize_is_to_minimize_the_negative(make: Make, config: dict[str, Any]) -> None:
    params = params_like((4,), (3, 2))
    twins = copies(params)
    options = {**fresh(config), "maximize": False}
    up, down = make(params, **{**options, "maximize": True}), make(twins, **options)
    for step in range(3):
        set_grads(params, step)
        set_grads(twins, step)
        for twin in twins:
            twin.grad.neg_()  # type: ignore[union-attr]
        up.step()
        down.step()
    assert_same(params, twins)


@contestants
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("config", [{}, {"weight_decay": 0.01}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_complex_parameters_are_pairs_of_reals(make: Make, dtype: torch.dtype, config: dict[str, Any]) -> None:
    values, *grads = (p.detach() for p in params_like(*[(3, 4)] * 5, dtype=dtype))
    param = torch.nn.Parameter(values.clone())
    pair = torch.nn.Parameter(torch.view_as_real(values).clone())
    one, other = make([param], **config), make([pair], **config)
    for grad in grads:
        param.grad, pair.grad = grad.clone(), torch.view_as_real(grad).clone()
        one.step()
        other.step()
    torch.testing.assert_close(torch.view_as_real(param.detach()), pair.detach())
    state = one.state[param]
    torch.testing.assert_close(torch.view_as_real(state["exp_avg"]), other.state[pair]["exp_avg"])


@contestants
@configs
def test_without_gradients_nothing_happens(make: Make, config: dict[str, Any]) -> None:
    params = params_like((4,), (3, 2))
    start = copies(params)
    optimizer = make(params, **fresh(config))
    optimizer.step()
    assert_same(params, start)
    assert not optimizer.state


@contestants
@configs
def test_zero_gradients_without_decay_move_nothing(make: Make, config: dict[str, Any]) -> None:
    params = params_like((4,), (3, 2))
    start = copies(params)
    optimizer = make(params, **{**fresh(config), "weight_decay": 0.0})
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same(params, start)


@contestants
@pytest.mark.parametrize("shape", [(), (0,), (0, 7), (1,), (1, 1, 1)], ids=str)
def test_any_shape(make: Make, shape: tuple[int, ...]) -> None:
    """Beside another parameter, and alone."""
    for shapes in ([shape], [(4,), shape]):
        params = params_like(*shapes)
        optimizer = make(params)
        train(params, optimizer, 2)
        assert all(param.isfinite().all() for param in params)
        assert optimizer.state[params[-1]]["exp_avg"].shape == shape


@contestants
def test_an_empty_parameter_from_numpy(make: Make) -> None:
    """Its strides are zero."""
    param = torch.nn.Parameter(torch.tensor(torch.zeros(0, 7).numpy()))
    train([param], make([param]), 2)


@contestants
def test_unused_and_frozen_parameters(make: Make) -> None:
    params = params_like((4,), (3,))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = make([*params, frozen])
    params[0].square().sum().backward()
    optimizer.step()
    assert list(optimizer.state) == params[:1]
    assert torch.equal(frozen, torch.ones(2))


@contestants
def test_gradients_may_begin_later(make: Make) -> None:
    params = params_like((4,), (3,))
    optimizer = make(params)
    params[0].grad = torch.ones(4)
    optimizer.step()
    train(params, optimizer, 2)
    assert [float(optimizer.state[param]["step"]) for param in params] == [3, 2]


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
def test_inference_mode(make: Make) -> None:
    params = params_like((4,), (3, 2))
    twins = copies(params)
    train(twins, make(twins), 3)
    with torch.inference_mode():
        train(params, make(params), 3)
    assert_same(params, twins)


@contestants
@pytest.mark.parametrize("steps_before", [0, 1])
def test_between_inference_mode_and_none(make: Make, steps_before: int) -> None:
    """State that was made outside serves inside. State that was made inside serves outside: more than AdamW's does."""
    params = params_like((4,), (3, 2))
    twins = copies(params)
    optimizer = make(params)
    train(params, optimizer, steps_before)
    with torch.inference_mode():
        train(params, optimizer, 1, seed=100 + steps_before)
    if make is adamw and not steps_before:
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            train(params, optimizer, 1)
        return
    train(params, optimizer, 2, seed=101 + steps_before)
    train(twins, make(twins), 3 + steps_before)
    assert_same(params, twins)


@contestants
def test_loading_in_inference_mode(make: Make) -> None:
    params = params_like((4,), (3, 2))
    optimizer = make(params)
    train(params, optimizer, 2)
    twins = copies(params)
    other = make(twins)
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.inference_mode():
        other.load_state_dict(saved)
    for own, its in ((params, optimizer), (twins, other)):
        train(own, its, 2)
    assert_same(params, twins)


@contestants
def test_step_hooks_in_order(make: Make) -> None:
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


@contestants
def test_a_pre_hook_may_replace_arguments(make: Make) -> None:
    params = params_like((4,))
    optimizer = make(params)
    called = []

    def closure() -> Tensor:
        called.append(1)
        return torch.ones(())

    optimizer.register_step_pre_hook(lambda own, args, kwargs: ((own, closure), kwargs))
    set_grads(params, 0)
    assert optimizer.step() == 1
    assert called == [1]


@contestants
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(make: Make, set_to_none: bool) -> None:
    params = params_like((4,), (3,))
    params[1].grad = torch.ones(3)
    make(params).zero_grad(set_to_none=set_to_none)
    assert params[0].grad is None
    assert params[1].grad is None if set_to_none else torch.equal(params[1].grad, torch.zeros(3))


@contestants
@pytest.mark.parametrize("contiguous", [True, False])
def test_gradients_and_parameters_of_any_strides(make: Make, contiguous: bool) -> None:
    params, grads = params_like((6, 4)), [p.detach() for p in params_like((6, 4), (6, 4), seed=1)]
    twins = copies(params)
    if not contiguous:
        params = [torch.nn.Parameter(params[0].detach().t().contiguous().t())]
    optimizer, other = make(params), make(twins)
    for grad in grads:
        params[0].grad = grad.clone() if contiguous else torch.cat([grad, grad], 1)[:, :4]
        twins[0].grad = grad.clone()
        optimizer.step()
        other.step()
    torch.testing.assert_close(params, twins)


@contestants
def test_tensor_betas(make: Make) -> None:
    params = params_like((4,))
    twins = copies(params)
    train(params, make(params, betas=(torch.tensor(0.8), torch.tensor(0.95))), 3)
    train(twins, make(twins, betas=(0.8, 0.95)), 3)
    torch.testing.assert_close(params, twins)


@contestants
def test_a_tensor_lr_is_read_anew_and_not_written(make: Make) -> None:
    params = params_like((4,))
    start = copies(params)
    lr = torch.tensor(0.0)
    optimizer = make(params, lr=lr)
    train(params, optimizer, 1)
    assert_same(params, start)
    lr.fill_(0.1)
    train(params, optimizer, 1)
    assert not torch.equal(params[0], start[0])
    assert lr == pytest.approx(0.1)


@contestants
def test_meta_parameters(make: Make) -> None:
    params = [torch.nn.Parameter(torch.ones(4, 3, device="meta"))]
    optimizer = make(params, **({} if make is adamw else {"backend": "auto"}))
    for _ in range(2):
        params[0].grad = torch.ones(4, 3, device="meta")
        optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].is_meta
    assert params[0].shape == (4, 3)


@contestants
def test_fake_tensors(make: Make) -> None:
    with FakeTensorMode():
        model = torch.nn.Linear(4, 3)
        optimizer = make(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[model.weight]["exp_avg_sq"].shape == (3, 4)


@contestants
def test_profiler_sees_steps(make: Make) -> None:
    params = params_like((4,))
    optimizer = make(params)
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(params, optimizer, 2)
    assert [event.count for event in profile.key_averages() if event.key == name] == [2]
