"""torch.amp.GradScaler in its fused contract, and steps that must change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.device import DEVICE
from tests.runs import SHAPES, everything, fused, random_grads, random_params, run, set_grads, steps_for, sum_tolerance

VARIANTS: list[Any] = [
    pytest.param(torch.float32, {}, id="plain"),
    pytest.param(torch.float32, {"amsgrad": True, "ema_decay": 0.5}, id="amsgrad, averages"),
    pytest.param(torch.float32, {"schedule": "lagged"}, id="lagged"),
    pytest.param(torch.float32, {"max_grad_norm": 0.5}, id="clipped"),
    pytest.param(torch.bfloat16, {"master_weights": True}, id="masters"),
    pytest.param(torch.bfloat16, {"stochastic_rounding": True}, id="stochastic"),
    pytest.param(torch.float32, {"state_dtype": "8bit"}, id="8 bits"),
]

pytestmark = pytest.mark.usefixtures("_codes_of_small_tensors")


def scaled_step(scaler: torch.amp.GradScaler, optimizer: FusedAdamS, unscale_first: bool) -> None:
    scaler.scale(torch.zeros(()))  # makes the scale
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize(("dtype", "options"), VARIANTS)
def test_scaled_run_equals_unscaled(
    backend: str, dtype: torch.dtype, options: dict[str, Any], unscale_first: bool
) -> None:
    """By a power of two, so that no bit differs; the schedule sees unscaled gradients."""
    params, grads = random_params(SHAPES, dtype), random_grads(SHAPES, steps_for(backend, 6), dtype)
    peers = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer, peer = fused(params, backend=backend, **options), fused(peers, backend=backend, **options)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for step_grads in grads:
        set_grads(params, [1024.0 * grad for grad in step_grads])
        scaled_step(scaler, optimizer, unscale_first)
        set_grads(peers, step_grads)
        peer.step()
        assert optimizer.exp_avg_sq_mean.item() == pytest.approx(float(peer.exp_avg_sq_mean), rel=1e-12)
        # As long as the host does not know of a step that was taken, pass 1 takes the norm.
        assert optimizer.grad_norm.item() == pytest.approx(float(peer.grad_norm), rel=sum_tolerance(backend))
    assert optimizer.metrics().get("clipped_share") == peer.metrics().get("clipped_share")
    for mine, other in zip(everything(optimizer, params), everything(peer, peers), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    if unscale_first or "max_grad_norm" not in options:
        assert all(map(torch.equal, everything(optimizer, params), everything(peer, peers)))
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize(("dtype", "options"), VARIANTS)
def test_an_infinity_changes_nothing(
    backend: str, dtype: torch.dtype, options: dict[str, Any], unscale_first: bool
) -> None:
    """Not parameters, moments, masters, step counts; nor, as the next step shows, sums."""
    params, grads = random_params(SHAPES, dtype), random_grads(SHAPES, 4, dtype)
    peers = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer, peer = fused(params, backend=backend, **options), fused(peers, backend=backend, **options)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, backoff_factor=0.5)
    scale = 64.0
    for t, step_grads in enumerate(grads):
        set_grads(params, [scale * grad for grad in step_grads])
        if t == 2:
            params[1].grad.view(-1)[7] = torch.inf
            before = everything(optimizer, params)
            scaled_step(scaler, optimizer, unscale_first)
            scale /= 2
            assert all(map(torch.equal, before, everything(optimizer, params)))
            continue
        scaled_step(scaler, optimizer, unscale_first)
        set_grads(peers, step_grads)
        peer.step()
    for mine, other in zip(everything(optimizer, params), everything(peer, peers), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    assert optimizer.exp_avg_sq_mean.item() == pytest.approx(float(peer.exp_avg_sq_mean), rel=1e-12)
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize(("dtype", "options"), [v for v in VARIANTS if v.id != "lagged"])
def test_skip_nonfinite(backend: str, dtype: torch.dtype, options: dict[str, Any], bad: float) -> None:
    params, grads = random_params(SHAPES, dtype), random_grads(SHAPES, 3, dtype)
    optimizer = fused(params, backend=backend, skip_nonfinite=True, **options)
    run(params, grads[:1], optimizer)
    before = everything(optimizer, params)
    poisoned = copy.deepcopy(grads[1])
    poisoned[5][17] = bad
    run(params, [poisoned], optimizer)
    assert all(map(torch.equal, before, everything(optimizer, params)))
    assert int(optimizer.skipped_steps) == 1
    assert not optimizer.grad_norm.isfinite()
    run(params, grads[2:], optimizer)
    assert int(optimizer.skipped_steps) == 1
    peers = [torch.nn.Parameter(tensor.clone()) for tensor in before[: len(params)]]
    assert not any(torch.equal(a, b) for a, b in zip(params, peers, strict=True) if a.numel() > 100)
    assert all(param.isfinite().all() for param in params)


def test_a_first_step_may_be_skipped(backend: str) -> None:
    params = random_params([(5,)])
    start = params[0].detach().clone()
    optimizer = fused(params, [{"params": [0]}], skip_nonfinite=True, backend=backend)
    run(params, [[torch.full((5,), torch.nan)]], optimizer)
    assert torch.equal(params[0], start)
    assert float(optimizer.state[params[0]]["step"]) == 0
    run(params, [[torch.ones(5)]], optimizer)
    assert params[0].isfinite().all()
    assert not torch.equal(params[0], start)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU is not waited for")
def test_the_first_step_that_is_taken_is_exact(backend: str) -> None:
    """GradScaler skips the first few until its scale fits. A lagged mean of nothing would mean no decay."""
    params, grads = random_params([(5,)]), random_grads([(5,)], 3)
    peers = copy.deepcopy(params)
    run(peers, grads, fused(peers, [{"params": [0]}], schedule="lagged", backend=backend))
    optimizer = fused(params, [{"params": [0]}], schedule="lagged", backend=backend)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    run(params, [[torch.full((5,), torch.inf)]] * 2, optimizer)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    run(params, grads, optimizer)
    assert torch.equal(params[0], peers[0])


def test_several_buckets_skip_together(backend: str) -> None:
    """The infinity is in one of them only."""
    params = [*random_params([(20,)]), *random_params([(20,)])]
    groups = [{"params": [0], "amsgrad": True}, {"params": [1]}]
    optimizer = fused(params, groups, skip_nonfinite=True, backend=backend)
    run(params, [[torch.randn(20), torch.randn(20)]], optimizer)
    before = everything(optimizer, params)
    run(params, [[torch.randn(20), torch.full((20,), torch.inf)]], optimizer)
    assert all(map(torch.equal, before, everything(optimizer, params)))
    assert int(optimizer.skipped_steps) == 1


def test_skipped_steps_are_counted_in_one_place(backend: str) -> None:
    """A CUDA graph goes on adding to the tensor that it was captured with."""
    params = random_params([(5,)])
    optimizer = fused(params, [{"params": [0]}], skip_nonfinite=True, backend=backend)
    run(params, [[torch.ones(5)]], optimizer)
    count = optimizer.skipped_steps
    run(params, [[torch.full((5,), torch.nan)]] * 2, optimizer)
    assert int(count) == 2


def test_scales_need_not_be_as_the_kernels_read_them(backend: str) -> None:
    """Another dtype stands for another device, which is converted in the same place."""
    params, grads = random_params([(5,)]), random_grads([(5,)], 2)
    peers = copy.deepcopy(params)
    run(peers, grads, fused(peers, [{"params": [0]}], backend=backend))
    optimizer = fused(params, [{"params": [0]}], backend=backend)
    optimizer.grad_scale = torch.tensor(4.0, dtype=torch.float64)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros(1, dtype=torch.float64)  # type: ignore[attr-defined]
    run(params, [[4 * grad for grad in step_grads] for step_grads in grads], optimizer)
    assert torch.equal(params[0], peers[0])


@pytest.mark.parametrize("unscale_first", [False, True])
def test_what_is_in_grad_after_a_scaled_step(unscale_first: bool) -> None:
    """As docs/mixed-precision.md has it: `.grad` is as before the step, `grad_norm` is that of unscaled gradients."""
    param = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer, scaler = FusedAdamS([param]), torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    scaler.scale((2 * param).sum()).backward()
    scaled_step(scaler, optimizer, unscale_first)
    assert param.grad.tolist() == [2.0 if unscale_first else 2048.0] * 3
    assert float(optimizer.grad_norm) == pytest.approx(12**0.5, rel=1e-6)
