"""An optimizer that is let go of is freed at once, with its state; and what a shallow copy of one may be."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from swd_fused import FusedAdamS
from tests.runs import random_grads, random_params, run

SHAPES = [(40,), (6, 7)]


@pytest.fixture(autouse=True, scope="module")  # a collection takes as long as ten of the tests
def _no_garbage_collection() -> Iterator[None]:
    # The first optimizer of a process, AdamW too, stays in a frame from which torch imports its compiler.
    torch.optim.AdamW(random_params([(1,)]))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


Params = list[nn.Parameter]


def run_of(optimizer: FusedAdamS, params: Params) -> FusedAdamS:
    run(params, random_grads(SHAPES, 2, params[0].dtype), optimizer)
    return optimizer


def backward(params: Params) -> float:
    loss = torch.stack([param.square().sum() for param in params]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def unused(params: Params, **options: Any) -> FusedAdamS:
    return FusedAdamS(params, **options)


def stepped(params: Params, **options: Any) -> FusedAdamS:
    return run_of(FusedAdamS(params, **options), params)


lagged = partial(stepped, schedule="lagged")
judged = partial(stepped, outliers="clip")
clipped = partial(stepped, max_grad_norm=0.5, skip_nonfinite=True)


def in_two_buckets(params: Params, **options: Any) -> FusedAdamS:
    return run_of(FusedAdamS([{"params": params[:1]}, {"params": params[1:], "amsgrad": True}], **options), params)


def told_the_sum(params: Params, **options: Any) -> FusedAdamS:
    optimizer = FusedAdamS(params, **options)
    for numel in (None, 82):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step(grad_sumsq=82.0, numel=numel)
    return optimizer


def told_by_a_provider(params: Params, **options: Any) -> FusedAdamS:
    optimizer = FusedAdamS(params, **options)
    optimizer.grad_sumsq_provider = lambda: (82.0, 82)
    return run_of(optimizer, params)


def calibrated(params: Params, **options: Any) -> FusedAdamS:
    optimizer = stepped(params, adamw_weight_decay=0.1, calibration_steps=1, **options)
    optimizer.metrics()
    return optimizer


def shown_and_saved(params: Params, **options: Any) -> FusedAdamS:
    optimizer = stepped(params, **options)
    repr(optimizer)
    pickle.dumps(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    return run_of(optimizer, params)


def copied(params: Params, **options: Any) -> FusedAdamS:
    copies, twin = copy.deepcopy((params, stepped(params, **options)))
    return run_of(twin, copies)


def set_anew(params: Params, **options: Any) -> FusedAdamS:
    optimizer = stepped(params, **options)
    optimizer.max_grad_norm, optimizer.backend = 0.5, "torch"
    return run_of(optimizer, params)


def refused(params: Params, **options: Any) -> FusedAdamS:
    optimizer = stepped(params, **options)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    return optimizer


def called_with_a_closure(params: Params, **options: Any) -> FusedAdamS:
    optimizer = FusedAdamS(params, **options)

    def closure() -> float:
        optimizer.zero_grad()
        return backward(params)

    optimizer.step(closure)
    del closure
    return optimizer


def released(params: Params, **options: Any) -> FusedAdamS:
    optimizer = FusedAdamS(params, schedule="lagged", **options)
    optimizer.release_gradients()
    for _ in range(3):
        backward(params)
        optimizer.step()
    return optimizer


def released_in_the_middle(params: Params, **options: Any) -> FusedAdamS:
    optimizer = released(params, **options)
    backward(params)
    return optimizer


def no_longer_released(params: Params, **options: Any) -> FusedAdamS:
    optimizer = released(params, **options)
    optimizer.release_gradients().remove()
    return run_of(optimizer, params)


USES: list[tuple[Callable[..., FusedAdamS], torch.dtype]] = [
    *((use, torch.float32) for use in (unused, stepped, lagged, clipped, judged, in_two_buckets, told_the_sum)),
    *((use, torch.float32) for use in (told_by_a_provider, calibrated, shown_and_saved, copied, set_anew, refused)),
    *((use, torch.float32) for use in (called_with_a_closure, released, released_in_the_middle, no_longer_released)),
    (partial(stepped, state_dtype="8bit"), torch.float32),
    (partial(stepped, decay="decoupled"), torch.float32),
    (partial(stepped, master_weights=True), torch.bfloat16),
    (partial(stepped, stochastic_rounding=True), torch.bfloat16),
]


@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize(("use", "dtype"), USES)
def test_freed_at_once(backend: str, use: Callable[..., FusedAdamS], dtype: torch.dtype) -> None:
    params = random_params(SHAPES, dtype)
    optimizer = use(params, backend=backend)
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    refs = [weakref.ref(optimizer), *map(weakref.ref, tensors)]
    del tensors, optimizer
    assert [ref() for ref in refs] == [None] * len(refs)
    for param in params:  # they may be trained on
        param.grad = None
    backward(params)


def test_loads_leave_no_weak_references_behind() -> None:
    optimizer = stepped(random_params(SHAPES))
    before = weakref.getweakrefcount(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert weakref.getweakrefcount(optimizer) == before


def test_a_handle_of_gradient_release_keeps_nothing_alive() -> None:
    """And may be removed after its optimizer is gone."""
    params = random_params(SHAPES)
    optimizer = released(params)
    handle, gone = optimizer.release_gradients(), weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    backward(params)
    assert all(param.grad is not None for param in params), "nobody takes them any more"
    handle.remove()


# --- Shallow copies


def test_a_shallow_copy_is_refused() -> None:
    """It would share moments, but not what is kept of them beside the state: each would step with the other's sums."""
    with pytest.raises(TypeError, match=r"copy\.deepcopy"):
        copy.copy(stepped(random_params(SHAPES)))
