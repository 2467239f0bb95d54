"""Everything that a torch optimizer does."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from swd_fused import FusedAdamS
from tests.runs import defined, error, is_interpreted, random_grads, random_params, run


def test_add_param_group_at_any_time(backend: str) -> None:
    shapes = [(40,), (50,)]
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, 6, torch.float64)
    for step_grads in grads[:3]:
        step_grads[1] = None  # type: ignore[call-overload]
    groups = [{"params": [0]}, {"params": [1], "lr": 0.1, "weight_decay": 1e-3}]
    reference = defined(params, grads, groups)
    optimizer = FusedAdamS(params[:1], backend=backend)
    run(params, grads[:3], optimizer)
    optimizer.add_param_group({"params": params[1], "lr": 0.1, "weight_decay": 1e-3})
    run(params, grads[3:], optimizer)
    assert error(params, reference.params) < 1e-15


def test_tensor_betas(backend: str) -> None:
    """They are read in each step, so changes in place count."""
    params, grads = random_params([(30,)]), random_grads([(30,)], 4)
    twins = [copy.deepcopy(param) for param in params]
    betas = torch.tensor(0.75), torch.tensor(0.5)
    optimizer = FusedAdamS(params, betas=betas, backend=backend)
    by_hand = FusedAdamS(twins, betas=(0.75, 0.5), backend=backend)
    run(params, grads[:2], optimizer)
    run(twins, grads[:2], by_hand)
    betas[0].fill_(0.25)
    by_hand.param_groups[0]["betas"] = (0.25, 0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["betas"] = betas
    run(params, grads[2:], optimizer)
    run(twins, grads[2:], by_hand)
    assert torch.equal(params[0], twins[0])


def test_autograd_notices_that_weights_changed(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    loss = (param.square() * 2).sum()
    run([param], [[torch.ones(3)]], FusedAdamS([param], backend=backend))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_another_default_device_does_not_matter(backend: str) -> None:
    params, grads = random_params([(5,)]), random_grads([(5,)], 2)
    twins = [copy.deepcopy(param) for param in params]
    run(twins, grads, FusedAdamS(twins, backend=backend))
    with torch.device("meta"):
        optimizer = FusedAdamS(params, backend=backend)
        run(params, grads[:1], optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        run(params, grads[1:], optimizer)
    assert torch.equal(params[0], twins[0])


def test_gradients_are_not_kept_alive(backend: str) -> None:
    """Nor those that the kernels must copy, since their memory is in another order than the parameter's."""
    shapes = [(30,), (4, 10)]
    params = random_params(shapes)
    optimizer = FusedAdamS(params, backend=backend)
    for step_grads in random_grads(shapes, 2):
        run(params, [step_grads], optimizer)
        params[1].grad = params[1].grad.mT.contiguous().mT
        optimizer.step()
        gradients = [weakref.ref(param.grad) for param in params]
        optimizer.zero_grad()
        assert [gradient() for gradient in gradients] == [None, None]


def test_repr_names_backend_and_schedule(backend: str) -> None:
    text = repr(FusedAdamS(random_params([(3,)]), backend=backend, schedule="lagged"))
    assert f"backend: {backend}{' (interpreted)' if is_interpreted(backend) else ''}\n" in text
    assert "schedule: lagged\n" in text


def test_auto_takes_the_fused_kernels() -> None:
    params = [*random_params([(3,)]), torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))]
    assert "backend: cpu\n" in repr(FusedAdamS(params[:1]))
    assert "backend: cpu and torch (no fused kernels for torch.float8_e4m3fn)\n" in repr(FusedAdamS(params))
