"""The same bits: for any number of threads, from run to run, and after a resume."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.runs import is_interpreted, random_grads, random_params, run

SHAPES = [(70_001,), (300, 50), (7,), (), (0,), (4, 3, 3, 3)]
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
    resumed = FusedAdamS(params, **options)
    resumed.load_state_dict(optimizer.state_dict())
    return resumed


def through_a_file(optimizer: FusedAdamS, params: list[torch.nn.Parameter], **options: Any) -> FusedAdamS:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = FusedAdamS(params, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    return resumed


def repointed(optimizer: FusedAdamS, old: list[torch.nn.Parameter], new: list[torch.nn.Parameter]) -> FusedAdamS:
    """A copied or unpickled optimizer has parameters of its own: let the test's be those."""
    own = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(a is not b and torch.equal(a, b) for a, b in zip(own, old, strict=True))
    new[:] = own
    return optimizer


def through_deepcopy(optimizer: FusedAdamS, params: list[torch.nn.Parameter], **_: Any) -> FusedAdamS:
    return repointed(copy.deepcopy(optimizer), params, params)


def through_pickle(optimizer: FusedAdamS, params: list[torch.nn.Parameter], **_: Any) -> FusedAdamS:
    return repointed(pickle.loads(pickle.dumps(optimizer)), params, params)


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize("resume", [through_state_dict, through_a_file, through_deepcopy, through_pickle])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_run_is_bit_identical(
    backend: str, options: dict[str, Any], layout: str, resume: Callable[..., FusedAdamS]
) -> None:
    assert_same_after_resume(resume, layout, steps_before=5, steps_after=5, backend=backend, **options)


@pytest.mark.backends(without=("torch", "cpu"), split=True)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_run_on_triton_is_bit_identical(backend: str, options: dict[str, Any], layout: str) -> None:
    """However it is resumed the sums are rebuilt from the moments."""
    assert_same_after_resume(through_state_dict, layout, steps_before=4, steps_after=2, backend=backend, **options)


def assert_same_after_resume(
    resume: Callable[..., FusedAdamS], layout: str, steps_before: int, steps_after: int, **options: Any
) -> None:
    shapes = shapes_for(options["backend"])
    params, grads = random_params(shapes), random_grads(shapes, steps_before + steps_after)
    if layout == "transposed":
        params = [
            torch.nn.Parameter(param.detach().mT.contiguous().mT if param.dim() > 1 else param) for param in params
        ]
    for step_grads in grads[3:]:
        step_grads[2] = None  # a parameter that has a state but no gradient any more
    twins = [copy.deepcopy(param) for param in params]
    uninterrupted = FusedAdamS(params, **options)
    run(params, grads[:steps_before], uninterrupted)

    optimizer = FusedAdamS(twins, **options)
    run(twins, grads[:steps_before], optimizer)
    optimizer = resume(optimizer, twins, **options)
    for step_grads in grads[steps_before:]:
        run(params, [step_grads], uninterrupted)
        run(twins, [step_grads], optimizer)
        # In float64, so it shows a sum that was rebuilt in another order, which float32 weights need not.
        assert torch.equal(uninterrupted.exp_avg_sq_mean, optimizer.exp_avg_sq_mean)
        assert all(map(torch.equal, params, twins))


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
    """Resetting the moments in place, or replacing them, must not leave a stale sum behind. The state loaded anew is
    what it must equal."""
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
    """Off and on again, where maxima are far above the second moments, in all groups or one; or one group's in exchange
    for the other's. The state loaded anew is what it must equal."""
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
