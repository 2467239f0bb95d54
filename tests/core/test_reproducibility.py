"""The same bits: for any number of threads, from run to run, and after a resume."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.runs import assert_same, everything, is_interpreted, random_grads, random_params, run

SHAPES = [(33_001,), (300, 50), (7,), (), (0,), (4, 3, 3, 3)]
SMALL_SHAPES = [(1025,), (30, 20), (7,), (), (0,), (4, 3, 3, 3)]  # for Triton's interpreter
FEW = [(20,), (30,), (7, 5)]
OPTIONS = [
    pytest.param({}, id="exact"),
    pytest.param({"schedule": "lagged"}, id="lagged"),
    pytest.param({"max_grad_norm": 1.0}, id="clipped"),
    pytest.param({"amsgrad": True}, id="amsgrad"),
    pytest.param({"amsgrad": True, "schedule": "lagged"}, id="amsgrad-lagged"),
]


@pytest.fixture
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def shapes_for(backend: str) -> list[tuple[int, ...]]:
    return SMALL_SHAPES if is_interpreted(backend) else SHAPES


def trained(threads: int, backend: str, **options: Any) -> list[torch.Tensor]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shapes = shapes_for(backend)
    params, grads = random_params(shapes), random_grads(shapes, 3)
    optimizer = FusedAdamS(params, backend=backend, **options)
    run(params, grads, optimizer)
    return [*params, optimizer.exp_avg_sq_mean, optimizer.grad_norm]


# Enough elements for a second thread, and for eight; with a gradient in another order than its parameter.
LARGE_SHAPES = [(300_001,), (300, 50), (7,), (600, 500), (1300, 40, 3, 3)]


def trained_in_threads(threads: int, **options: Any) -> list[torch.Tensor]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    params = random_params(LARGE_SHAPES)
    grads = [[g.t().contiguous().t() if g.dim() == 2 else g for g in step] for step in random_grads(LARGE_SHAPES, 3)]
    optimizer = FusedAdamS(params, backend="cpu", **options)
    run(params, grads, optimizer)
    return [*params, optimizer.exp_avg_sq_mean, optimizer.grad_norm]


@pytest.mark.usefixtures("_restore_threads")
@pytest.mark.parametrize("options", [*OPTIONS, pytest.param({"state_dtype": "8bit"}, id="8bit")])
def test_threads_do_not_matter(options: dict[str, Any]) -> None:
    one = trained_in_threads(1, **options)
    for threads in (2, 3, 8):
        assert all(map(torch.equal, one, trained_in_threads(threads, **options)))


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("options", OPTIONS)
def test_two_runs_are_equal(backend: str, options: dict[str, Any]) -> None:
    threads = torch.get_num_threads()
    first, second = (trained(threads, backend=backend, **options) for _ in range(2))
    assert all(map(torch.equal, first, second))


def through_state_dict(optimizer: FusedAdamS, params: list[torch.nn.Parameter], **options: Any) -> FusedAdamS:
    """As a file has it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = FusedAdamS(params, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    return resumed


# All kinds of state, and all that a step leaves for the next one.
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    **{param.id: (torch.float32, *param.values) for param in OPTIONS},
    "tensor lr": (torch.float32, {"lr": torch.tensor(1e-3), "corrected_decay": True, "largest_lr": 1e-3}),
    "decoupled": (torch.float32, {"decay": "decoupled", "corrected_decay": True, "max_grad_norm": 0.5}),
    "independent": (torch.float32, {"decay": "independent", "cautious_decay": True}),
    "l2": (torch.float32, {"decay": "l2", "bias_correction": False}),
    "calibrating": (torch.float32, {"adamw_weight_decay": 0.1, "calibration_steps": 7}),
    "calibrated": (torch.float32, {"adamw_weight_decay": 0.1, "calibration_steps": 3}),
    "masters": (torch.bfloat16, {"master_weights": True, "max_grad_norm": 0.5, "skip_nonfinite": True}),
    "float32 masters": (torch.float16, {"master_weights": True, "amsgrad": True, "ema_decay": 0.9}),
    "rounding": (torch.bfloat16, {"stochastic_rounding": True, "seed": 5, "amsgrad": True}),
    "bfloat16": (torch.bfloat16, {"master_weights": True, "state_dtype": torch.bfloat16}),
    "float16, lagged": (torch.float32, {"state_dtype": torch.float16, "schedule": "lagged"}),
    "8 bits, lagged": (torch.float32, {"state_dtype": "8bit", "schedule": "lagged", "seed": 7}),
    "8 bits, amsgrad": (torch.float32, {"state_dtype": "8bit", "amsgrad": True, "max_grad_norm": 0.5}),
    "8 bits, rounding": (torch.bfloat16, {"state_dtype": "8bit", "stochastic_rounding": True}),
    "outliers": (torch.float32, {"outliers": "skip"}),
    "averages": (torch.complex64, {"ema_decay": 0.9, "ema_warmup": True}),
    "averages of masters": (torch.bfloat16, {"state_dtype": "8bit", "master_weights": True, "ema_decay": 0.9}),
}


def groups_without_params(optimizer: FusedAdamS) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.thinned
@pytest.mark.backends(interpreted=False)
@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_bit_identical(backend: str, name: str) -> None:
    assert_same_after_resume(backend, name)


ON_TRITON = ["exact", "lagged", "amsgrad-lagged", "masters", "rounding", "8 bits, lagged", "averages of masters"]


@pytest.mark.backends(without=("torch", "cpu"), split=True)
@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize("name", ON_TRITON)
def test_a_resumed_run_on_triton_is_bit_identical(backend: str, name: str) -> None:
    assert_same_after_resume(backend, name)


def assert_same_after_resume(backend: str, name: str) -> None:
    """From a state dict, a copy or a pickle, after the peak of lr; a matrix is transposed, and one has no gradient any
    more. However it is resumed the sums are rebuilt from the moments."""
    dtype, given = RUNS[name]
    shapes, half = shapes_for(backend), 4 if is_interpreted(backend) else 5
    params, grads = random_params(shapes, dtype), random_grads(shapes, half + 2, dtype)
    params[1] = torch.nn.Parameter(params[1].detach().mT.contiguous().mT)
    options: dict[str, Any] = {"lr": 1e-3, "backend": backend, **copy.deepcopy(given)}
    optimizer = FusedAdamS(params, **options)

    def step(optimizer: FusedAdamS, params: list[torch.nn.Parameter], t: int) -> None:
        lr = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = lr.mul_(1.5 - t / 4) if isinstance(lr, torch.Tensor) else lr * (1.5 - t / 4)
        run(params, [[None if t > 2 and i == 2 else grad for i, grad in enumerate(grads[t])]], optimizer)

    for t in range(half):
        step(optimizer, params, t)
    twins = copy.deepcopy(params)
    resumed = [(through_state_dict(optimizer, twins, **{**options, "lr": copy.deepcopy(options["lr"])}), twins)]
    if not is_interpreted(backend):  # all three rebuild the sums in the same way
        resumed += [copy.deepcopy((optimizer, params)), pickle.loads(pickle.dumps((optimizer, params)))]
    for t in range(half, half + 2):
        step(optimizer, params, t)
        for other, others in resumed:
            step(other, others, t)
            # In float64, so it shows a sum that was rebuilt in another order, which float32 weights need not.
            assert_same(other.exp_avg_sq_mean, optimizer.exp_avg_sq_mean)
            assert all(map(torch.equal, everything(other, others), everything(optimizer, params)))
            assert_same(groups_without_params(other), groups_without_params(optimizer))


@pytest.mark.backends(split=True)
@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize("state_dtype", [None, "8bit"])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_resumed_run_whose_gradients_are_aligned_otherwise(backend: str, schedule: str, state_dtype: Any) -> None:
    """Kernels may add what is aligned in another order, and sums that are kept are those of the step before."""
    options: dict[str, Any] = {"backend": backend, "schedule": schedule, "state_dtype": state_dtype}
    params = random_params([(4, 600), (4, 600)])
    optimizer = FusedAdamS(params, **options)
    aligned, unaligned = torch.randn(4, 600), torch.randn(2401)[1:].view(4, 600)
    for grads in ([unaligned, aligned], [aligned, unaligned], [aligned, None], [unaligned, aligned]):
        twins = [copy.deepcopy(param) for param in params]
        resumed = through_state_dict(optimizer, twins, **options)
        for tensors, each in ((params, optimizer), (twins, resumed)):
            for param, grad in zip(tensors, grads, strict=True):
                param.grad = grad
            each.step()
        assert torch.equal(optimizer.exp_avg_sq_mean, resumed.exp_avg_sq_mean)
        assert all(map(torch.equal, params, twins))


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("key", ["exp_avg_sq", "max_exp_avg_sq"])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_the_sum_is_rebuilt_when_someone_else_writes_to_the_state(backend: str, schedule: str, key: str) -> None:
    """Moments that are reset in place, or replaced, leave no stale sum: the next step is that of the loaded state."""
    options: dict[str, Any] = {"schedule": schedule, "backend": backend, "amsgrad": key != "exp_avg_sq"}
    for write in (lambda state: state[key].mul_(100), lambda state: state.update({key: state[key] * 100})):
        shapes = shapes_for(backend)
        params, grads = random_params(shapes), random_grads(shapes, 3)
        optimizer = FusedAdamS(params, **options)
        run(params, grads[:2], optimizer)
        for param in params:
            write(optimizer.state[param])
        twins = [copy.deepcopy(param) for param in params]
        resumed = through_state_dict(optimizer, twins, **options)
        for tensors, each in ((params, optimizer), (twins, resumed)):
            run(tensors, grads[2:], each)
        assert torch.equal(optimizer.exp_avg_sq_mean, resumed.exp_avg_sq_mean)
        assert all(map(torch.equal, params, twins))


@pytest.mark.parametrize("switched", [(False, False), (False, True), None], ids=str)
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_amsgrad_that_is_switched_between_steps_is_obeyed(
    backend: str, schedule: str, switched: tuple[bool, bool] | None
) -> None:
    """Off and on again, or in exchange, where maxima are far above the second moments: as the state loaded anew."""
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.5), "schedule": schedule, "backend": backend}
    at_first = (True, True) if switched else (True, False)
    params = random_params(FEW)
    optimizer = FusedAdamS([{"params": params[:2]}, {"params": params[2:]}], **options)
    switch_amsgrad(optimizer, (True, True))
    small = [[0.01 * grad for grad in grads] for grads in random_grads(FEW, 4)]
    run(params, [*random_grads(FEW, 1), *small], optimizer)
    for amsgrad in (at_first, switched or (False, True), at_first):
        switch_amsgrad(optimizer, amsgrad)
        others = copy.deepcopy(params)
        loaded = FusedAdamS([{"params": others[:2]}, {"params": others[2:]}], **options)
        loaded.load_state_dict(optimizer.state_dict())
        run(params, small[:1], optimizer)
        run(others, small[:1], loaded)
        assert torch.equal(optimizer.exp_avg_sq_mean, loaded.exp_avg_sq_mean)
        assert all(map(torch.equal, params, others))
        run(params, small, optimizer)


def switch_amsgrad(optimizer: FusedAdamS, amsgrad: tuple[bool, bool]) -> None:
    for group, value in zip(optimizer.param_groups, amsgrad, strict=True):
        group["amsgrad"] = value


def test_a_state_that_was_cleared_starts_anew(backend: str) -> None:
    shapes = shapes_for(backend)
    params, grads = random_params(shapes), random_grads(shapes, 3)
    optimizer = FusedAdamS(params, backend=backend)
    run(params, grads, optimizer)
    optimizer.state.clear()
    twins = [copy.deepcopy(param) for param in params]
    run(params, grads, optimizer)
    run(twins, grads, FusedAdamS(twins, backend=backend))
    assert all(map(torch.equal, params, twins))
