"""torch.amp.GradScaler around an optimizer."""

from __future__ import annotations

import pytest
import torch

from tests.core.torch_expectations.contestants import Make, assert_same, contestants, copies, params_like, set_grads


@contestants
@pytest.mark.parametrize("unscale", [False, True])
def test_equals_training_without(make: Make, unscale: bool) -> None:
    params = params_like((5,), (3,))
    twins = copies(params)
    optimizer, scaler = make(params, lr=0.01), torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(sum(param.square().sum() for param in params)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 100.0)
        scaler.step(optimizer)
        scaler.update()
    plain = make(twins, lr=0.01)
    for _ in range(5):
        plain.zero_grad()
        sum(param.square().sum() for param in twins).backward()  # type: ignore[union-attr]
        plain.step()
    torch.testing.assert_close(params, twins)
    assert scaler.get_scale() == 128.0 * 4


@contestants
def test_an_infinity_skips_the_step_and_halves_the_scale(make: Make) -> None:
    params = params_like((5,), (3,))
    optimizer, scaler = make(params), torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.zeros(()))
    set_grads(params, 0)
    scaler.step(optimizer)
    scaler.update()
    before, steps = copies(params), float(optimizer.state[params[0]]["step"])
    set_grads(params, 1)
    params[1].grad[0] = torch.inf  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    assert_same(params, before)
    assert float(optimizer.state[params[0]]["step"]) == steps
    assert scaler.get_scale() == 64.0


@contestants
def test_step_passes_arguments_on(make: Make) -> None:
    """A closure is refused by GradScaler itself."""
    params = params_like((5,))
    optimizer, scaler = make(params), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    set_grads(params, 0)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
