"""Steps that are told the sum of squared gradients: the same result without pass 1, by parts too."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.backends import choose
from tests.runs import defined, error, random_grads, random_params, set_grads, steps_for

SHAPES = [(300,), (40, 5), (), (7, 3)]
GROUPS = [{"params": [0, 1], "weight_decay": 2e-3}, {"params": [2, 3], "weight_decay": 0.0, "eps": 1e-6}]
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)


def sumsq(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum()


def prepared(backend: str, **options: Any) -> tuple[list[torch.nn.Parameter], list[list[Tensor]], FusedAdamS]:
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, steps_for(backend, 10), torch.float64)
    groups = [{**group, "params": [params[i] for i in group["params"]]} for group in GROUPS]
    return params, grads, FusedAdamS(groups, lr=0.01, backend=backend, **options)


@pytest.mark.parametrize("numel", [None, NUMEL])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 2.0}, {"bias_correction": False}], ids=str)
def test_a_given_sum_gives_the_same_step(backend: str, options: dict[str, Any], numel: int | None) -> None:
    params, grads, optimizer = prepared(backend, **options)
    reference = defined(params, grads, GROUPS, lr=0.01, **options)
    for t, step_grads in enumerate(grads):
        set_grads(params, step_grads)
        given = sumsq(step_grads)
        optimizer.step(grad_sumsq=given if t % 2 else float(given), numel=numel)
    assert error(params, reference.params) < 1e-14
    torch.testing.assert_close(float(optimizer.exp_avg_sq_mean), float(reference.exp_avg_sq_mean), rtol=1e-12, atol=0)
    torch.testing.assert_close(float(optimizer.grad_norm), float(reference.grad_norm), rtol=1e-12, atol=0)


def test_a_given_sum_saves_the_first_pass(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither gradients nor moments are read before the update, but for the first time."""
    params, grads, optimizer = prepared(backend)
    set_grads(params, grads[0])
    optimizer.step(grad_sumsq=sumsq(grads[0]))
    chosen = type(choose(params[0], optimizer.options))
    for name in ("pass1", "step", "exp_avg_sq_sums", "pass1_amsgrad"):
        monkeypatch.setattr(chosen, name, None)
    set_grads(params, grads[1])
    optimizer.step(grad_sumsq=sumsq(grads[1]))
    with pytest.raises(TypeError):
        optimizer.step()


def test_parts_of_a_step_share_a_given_sum(backend: str) -> None:
    """As DeepSpeed does it: each group alone in `param_groups`, one after the other, state loaded in the middle."""
    params, grads, optimizer = prepared(backend)
    reference = defined(params, grads, GROUPS, lr=0.01)
    for t, step_grads in enumerate(grads):
        if t == len(grads) // 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        given = sumsq(step_grads)
        groups = optimizer.param_groups
        for group in groups:
            optimizer.param_groups = [group]
            set_grads(params, step_grads)
            optimizer.step(grad_sumsq=given, numel=NUMEL)
        optimizer.param_groups = groups
    assert error(params, reference.params) < 1e-14


@pytest.mark.parametrize("first", [0, 1])
def test_a_rollback_in_the_middle_of_a_step_starts_from_the_state(backend: str, first: int) -> None:
    """To a state of much smaller sums, after one of two groups was stepped; on with that group or with the other."""
    params, grads, optimizer = prepared(backend)
    step_by_parts(optimizer, params, [0.01 * grad for grad in grads[0]], optimizer.param_groups)
    saved = copy.deepcopy(([param.detach() for param in params], optimizer.state_dict()))
    step_by_parts(optimizer, params, grads[1], optimizer.param_groups)
    step_by_parts(optimizer, params, grads[1], optimizer.param_groups[:1])
    others = [torch.nn.Parameter(values.clone()) for values in saved[0]]
    resumed = FusedAdamS(
        [{**group, "params": [others[i] for i in group["params"]]} for group in GROUPS], lr=0.01, backend=backend
    )
    with torch.no_grad():
        for param, values in zip(params, saved[0], strict=True):
            param.copy_(values)
    for own, each in ((params, optimizer), (others, resumed)):
        each.load_state_dict(saved[1])
        step_by_parts(each, own, grads[2], [each.param_groups[first], each.param_groups[1 - first]])
    assert torch.equal(optimizer.exp_avg_sq_mean, resumed.exp_avg_sq_mean)
    assert all(map(torch.equal, params, others))


def step_by_parts(
    optimizer: FusedAdamS, params: list[torch.nn.Parameter], grads: list[Tensor], groups: list[dict[str, Any]]
) -> None:
    every = optimizer.param_groups
    for group in groups:
        optimizer.param_groups = [group]
        set_grads(params, grads)
        optimizer.step(grad_sumsq=sumsq(grads), numel=NUMEL)
    optimizer.param_groups = every


def test_a_step_that_is_skipped_by_parts_counts_once(backend: str) -> None:
    params, grads, optimizer = prepared(backend, skip_nonfinite=True)
    for given in (torch.nan, 1.0, torch.inf, torch.inf):
        for param, grad in zip(params, grads[0], strict=True):
            param.grad = grad.clone()
            optimizer.step(grad_sumsq=given, numel=NUMEL)
            param.grad = None
    assert int(optimizer.skipped_steps) == 3


def test_a_provider_is_asked_in_each_step(backend: str) -> None:
    params, grads, optimizer = prepared(backend)
    reference = defined(params, grads, GROUPS, lr=0.01)
    asked = iter(grads)
    optimizer.grad_sumsq_provider = lambda: (sumsq(next(asked)), None)
    for step_grads in grads:
        set_grads(params, step_grads)
        optimizer.step()
    assert error(params, reference.params) < 1e-14
    assert next(asked, None) is None


def test_a_skipped_step_with_a_given_sum_leaves_sums_right(backend: str) -> None:
    params, grads, optimizer = prepared(backend, skip_nonfinite=True)
    reference = defined(params, grads[:2], GROUPS, lr=0.01)
    set_grads(params, grads[0])
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step(grad_sumsq=torch.inf, numel=NUMEL)
    set_grads(params, grads[1])
    optimizer.step()
    assert error(params, reference.params) < 1e-14


def test_given_and_computed_sums_take_turns(backend: str) -> None:
    params, grads, optimizer = prepared(backend)
    reference = defined(params, grads, GROUPS, lr=0.01)
    for t, step_grads in enumerate(grads):
        set_grads(params, step_grads)
        given: list[dict[str, Any]] = [{}, {"grad_sumsq": sumsq(step_grads)}, {"numel": NUMEL}]
        given[2].update(given[1])
        optimizer.step(**given[t % 3])
    assert error(params, reference.params) < 1e-14


@pytest.mark.backends(interpreted=False)
def test_a_skipped_step_does_not_advance_the_sum_of_the_whole_model(backend: str) -> None:
    """Neither what it adds up nor the steps by which its bias is corrected."""
    means = []
    for sums in ([5.0, 5.0], [5.0, float("inf"), 5.0]):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = FusedAdamS([param], skip_nonfinite=True, backend=backend)
        for grad_sumsq in sums:
            param.grad = torch.ones(5)
            optimizer.step(grad_sumsq=grad_sumsq, numel=5)
        means.append(float(optimizer.exp_avg_sq_mean))
    assert means[0] == means[1] == pytest.approx(1.0)
