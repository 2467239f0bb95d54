"""Sizes and situations where other optimizers went wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from swd_fused import FusedAdamS
from tests.runs import defined, error, is_interpreted, random_grads, random_params, run, set_grads


def assert_as_defined(backend: str, shapes: list[tuple[int, ...]], steps: int = 5) -> None:
    steps = min(steps, 2) if is_interpreted(backend) else steps
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, steps, torch.float64)
    reference = defined(params, grads, [{"params": range(len(shapes))}])
    run(params, grads, FusedAdamS(params, backend=backend))
    assert error(params, reference.params) < 1e-15


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("position", [0, 1, 3])
def test_empty_and_zero_dimensional_tensors_anywhere(backend: str, position: int) -> None:
    shapes: list[tuple[int, ...]] = [(5,), (4, 3), (7,)]
    shapes[position:position] = [(0,), (), (3, 0, 2)]
    assert_as_defined(backend, shapes)


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_empty_tensors_whose_strides_are_zero(backend: str, schedule: str) -> None:
    """As torch makes them from NumPy's."""
    params = [torch.nn.Parameter(torch.tensor(np.zeros((0, 7), np.float32))), *random_params([(30,)])]
    twins = [torch.nn.Parameter(params[1].detach().clone())]
    grads = random_grads([(0, 7), (30,)], 3)
    assert params[0].stride() == (0, 0)
    optimizer = FusedAdamS(params, amsgrad=True, schedule=schedule, backend=backend)
    for step_grads in grads:
        run(params, [[torch.zeros_like(params[0]), step_grads[1]]], optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    run(twins, [[grad] for _, grad in grads], FusedAdamS(twins, amsgrad=True, schedule=schedule, backend=backend))
    assert torch.equal(params[1], twins[0])


def test_only_empty_tensors(backend: str) -> None:
    params = random_params([(0,), (2, 0)])
    optimizer = FusedAdamS(params, backend=backend)
    run(params, random_grads([(0,), (2, 0)], 2), optimizer)
    assert optimizer.exp_avg_sq_mean == 0
    assert optimizer.state[params[0]]["step"] == 2


# Around a vector, a block, what pass 1 has on its way, and the most that a segment holds.
@pytest.mark.parametrize("numel", [1, 3, 4, 5, 511, 512, 513, 4095, 4096, 4097, 9000])
@pytest.mark.backends(without=("torch", "cpu"), split=True)
def test_sizes_around_tritons_limits(backend: str, numel: int) -> None:
    assert_as_defined(backend, [(numel,)], steps=3)


@pytest.mark.backends(without=("torch", "cpu"), split=True)
def test_segments_that_are_full(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At their real length of 2^18 elements the interpreter would take long."""
    from swd_fused.backends.triton import plan

    monkeypatch.setattr(plan, "MAX_SEGMENT", 2 * plan.BLOCK)
    assert_as_defined(backend, [(1023,), (1024,), (1025,), (5000,)], steps=3)


def test_thousands_of_tiny_tensors(backend: str) -> None:
    """More than the interpreted kernels add up at once, in any case."""
    assert_as_defined(backend, [(1 + i % 5,) for i in range(130 if is_interpreted(backend) else 3000)], steps=2)


@pytest.mark.backends(split=True)
def test_a_gradient_that_comes_and_goes(backend: str) -> None:
    """Each parameter has its own step count, and is neither decayed nor counted while it has no gradient."""
    shapes = [(50,), (60,), (70,)]
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, 12, torch.float64)
    for t, step_grads in enumerate(grads):
        if t % 3 == 1:
            step_grads[1] = None  # type: ignore[call-overload]
        if t < 5:
            step_grads[2] = None  # type: ignore[call-overload]
    reference = defined(params, grads, [{"params": range(3)}])
    optimizer = FusedAdamS(params, backend=backend)
    run(params, grads, optimizer)
    assert error(params, reference.params) < 1e-15
    assert [int(optimizer.state[param]["step"]) for param in params] == reference.steps == [12, 8, 7]


def test_all_gradients_none(backend: str) -> None:
    params = random_params([(5,), (6,)])
    before = [param.detach().clone() for param in params]
    optimizer = FusedAdamS(params, backend=backend)
    assert optimizer.step() is None
    assert all(map(torch.equal, params, before))
    assert not optimizer.state


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_zero_gradients_on_a_fresh_optimizer_change_nothing(backend: str, schedule: str, amsgrad: bool) -> None:
    """Checkpoint loaders take such a step to create the state."""
    params = random_params([(5,), (600,)])
    before = [param.detach().clone() for param in params]
    optimizer = FusedAdamS(params, schedule=schedule, amsgrad=amsgrad, backend=backend)
    for _ in range(3):
        run(params, [[torch.zeros_like(param) for param in params]], optimizer)
        assert all(map(torch.equal, params, before))
        assert optimizer.exp_avg_sq_mean == 0
        assert optimizer.effective_weight_decay() == [0.0]


def test_tiny_gradients_do_not_explode_the_decay(backend: str) -> None:
    """Unbounded, gradients of rms 1e-9 would turn a weight of 1 into -499."""
    param = torch.nn.Parameter(torch.ones(10))
    optimizer = FusedAdamS([param], eps=0.0, lr=1e-3, backend=backend)
    with pytest.warns(UserWarning, match="max_decay"):
        run([param], [[torch.full((10,), 1e-9)]], optimizer)
    torch.testing.assert_close(param.detach(), torch.full((10,), 0.9 - 1e-3), rtol=1e-6, atol=0)


# Around what the kernels add as vectors, and in several of their blocks and segments.
EDGE_NUMELS = {"torch": [1, 64, 4097, 40_001], "cpu": [1, 63, 64, 65, 4097, 40_001], "triton": [600]}


@pytest.mark.backends(split=True)
@pytest.mark.filterwarnings("ignore:.*max_decay")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
@pytest.mark.parametrize("size", [1e-38, 1e-23, 1e-19, 1e19, 1e25, 1e38])
def test_squares_beyond_float32_are_summed(backend: str, size: float, schedule: str, dtype: torch.dtype) -> None:
    """In tensors of all lengths, in their bodies and tails: by the norm, and by what the schedule makes of it."""
    for numel in EDGE_NUMELS[backend]:
        for elements in (slice(None), slice(-1, None)):
            param, grad = torch.nn.Parameter(torch.ones(numel, dtype=dtype)), torch.zeros(numel)
            grad[elements] = size * (0.5 + torch.rand(numel))[elements]
            grads = [[grad.to(dtype)]]
            max_grad_norm = None if size < 1 or schedule == "lagged" else 1.0
            reference = defined([param], grads, [{"params": [0]}], max_grad_norm=max_grad_norm)
            optimizer = FusedAdamS([param], max_grad_norm=max_grad_norm, schedule=schedule, backend=backend)
            run([param], grads, optimizer)
            assert float(optimizer.grad_norm) == pytest.approx(float(reference.grad_norm), rel=2e-6, abs=0)
            if schedule == "exact":
                mean = pytest.approx(float(reference.exp_avg_sq_mean), rel=4e-6, abs=0)
                assert float(optimizer.exp_avg_sq_mean) == mean
                assert error([param], reference.params) < (1e-7 if dtype == torch.float32 else 2**-8)


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_does_not_spread(backend: str, bad: float, max_grad_norm: float | None) -> None:
    """One bad value spoils its own element, as in AdamW, and not all weights through the schedule. Clipping by a norm
    of NaN spoils all, as by torch's."""
    params = random_params([(5,), (6,)])
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    grads = random_grads([(5,), (6,)], 1)
    grads[0][0][2] = bad
    run(params, grads, FusedAdamS(params, max_grad_norm=max_grad_norm, backend=backend))
    set_grads(twins, grads[0])
    if max_grad_norm:
        torch.nn.utils.clip_grad_norm_(twins, max_grad_norm)
    torch.optim.Adam(twins).step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert params[1].isfinite().all() == (max_grad_norm is None or bad == math.inf)


@pytest.mark.backends(split=True)
def test_amsgrad_keeps_nan_as_torch_does(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(20))
    optimizer = FusedAdamS([param], amsgrad=True, backend=backend)
    run([param], [[torch.ones(20)]], optimizer)
    run([param], [[torch.full((20,), float("nan"))]], optimizer)
    assert optimizer.state[param]["max_exp_avg_sq"].isnan().all()


@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"max_grad_norm": 1.0}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_steps_where_nothing_can_be_read(device: str, options: dict[str, Any]) -> None:
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        model = torch.nn.Linear(4, 3)
        optimizer = FusedAdamS(model.parameters(), lr=0.1, **options)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    moment = optimizer.state[model.weight]["exp_avg"]
    assert isinstance(moment, FakeTensor) if device == "fake" else moment.is_meta


def available_memory() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.slow
@pytest.mark.skipif(available_memory() < 11 * 2**30, reason="needs 11 GB of memory: tensors beyond 2^31 elements")
def test_beyond_2_31_elements() -> None:
    """Parameter and gradient are dense bfloat16, 4.3 GB each. Expanded moments take little memory: with betas of zero
    they are functions of the gradient, the same everywhere, so it does not matter how often each is written."""
    rows, columns = 2**20, 2049
    numel = rows * columns
    assert numel > 2**31
    param = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))
    param.grad = torch.full((rows, columns), 0.5, dtype=torch.bfloat16)
    optimizer = FusedAdamS([param], lr=0.5, betas=(0.0, 0.0), eps=0.0, backend="cpu")
    state = optimizer.state[param]
    state["step"] = torch.zeros(())
    state["exp_avg"] = torch.zeros(rows, 1).expand(rows, columns)
    state["exp_avg_sq"] = torch.zeros(rows, 1).expand(rows, columns)
    optimizer.step()
    assert optimizer.exp_avg_sq_mean == 0.25
    assert optimizer.grad_norm.item() == pytest.approx(0.5 * numel**0.5, rel=1e-12)
    param.grad = None
    assert all((slab == -0.5).all() for slab in param.detach().split(2**14))
