"""The scheduler by itself: with Adam it is FusedAdamS, with others it decays by the same schedule."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS, ScheduledWeightDecay
from tests.definition import WRONG, AdamS
from tests.runs import GROUPS, SHAPES, defined, error, fused, random_grads, random_params, run, to_numpy

STEPS = 40
LAMBDA = "scheduled_weight_decay"

# As tests.runs has them, in the wrapper's words.
WRAPPED_GROUPS = [{**{k: v for k, v in g.items() if k != "weight_decay"}, LAMBDA: g["weight_decay"]} for g in GROUPS]


def wrapped(params: list[torch.nn.Parameter], kind: Any = torch.optim.Adam, **options: Any) -> ScheduledWeightDecay:
    groups = [{**group, "params": [params[i] for i in group["params"]]} for group in WRAPPED_GROUPS]
    return ScheduledWeightDecay(kind(groups, **options))


def coming_and_going(grads: list[list[Tensor]]) -> list[list[Tensor | None]]:
    """Each tensor in turn has no gradient, so that their steps differ."""
    return [[None if t > 5 and (t + i) % 4 == 0 else grad for i, grad in enumerate(row)] for t, row in enumerate(grads)]


# --- With Adam


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_of_adam_equals_the_paper(kind: Any, implementation: str) -> None:
    params = random_params(SHAPES, torch.float64)
    grads = coming_and_going(random_grads(SHAPES, STEPS, torch.float64))
    reference = defined(params, grads)
    run(params, grads, wrapped(params, kind, **{implementation: True}))
    assert error(params, reference.params) < 1e-14


def fused_adam(params: list[torch.nn.Parameter], **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, fused=True, **options)


@pytest.mark.parametrize("build", [fused_adam, torch.optim.Adam])
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_lr_zero_changes_no_weight(build: Any, lr: Any) -> None:
    params = random_params([(4,)], torch.float64)
    before = params[0].detach().clone()
    optimizer = ScheduledWeightDecay(build(params, lr=lr, eps=0.0), weight_decay=1e300)  # and 1e300 / 1e-30 overflows
    run(params, [[torch.full((4,), 1e-30, dtype=torch.float64)]], optimizer)
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e25])
@pytest.mark.parametrize("numel", [300, 1 << 20])
def test_the_mean_of_gradients_of_any_size_is_right(size: float, numel: int) -> None:
    """Their squares are out of float32's range, and a million of them added one by one would be off by 4e-4."""
    param = torch.nn.Parameter(torch.zeros(numel))
    optimizer = ScheduledWeightDecay(torch.optim.SGD([param], lr=0.0))
    run([param], [[torch.full((numel,), size)]] * 2, optimizer)
    assert float(optimizer.exp_avg_sq_mean) == pytest.approx(float(np.float32(size)) ** 2, rel=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_no_step_waits_for_a_device(kind: Any) -> None:
    """On the meta device whatever reads a number raises."""
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in [(300,), (3, 5)]]
    optimizer = ScheduledWeightDecay(kind(params, lr=1e-2))
    for _ in range(2):
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert optimizer.exp_avg_sq_mean.is_meta


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.__name__ != "MeanNotClipped"], ids=lambda w: w.__name__)
def test_wrong_schedules_would_be_seen(wrong: type[AdamS]) -> None:
    params = random_params(SHAPES, torch.float64)
    grads = random_grads(SHAPES, STEPS, torch.float64)
    reference = defined(params, grads, definition=wrong)
    run(params, grads, wrapped(params))
    assert error(params, reference.params) > 1e-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_adam_equals_fused_adams_with_gradients_that_come_and_go(dtype: torch.dtype) -> None:
    params = random_params(SHAPES, dtype)
    twins = copy.deepcopy(params)
    grads = coming_and_going(random_grads(SHAPES, STEPS, dtype))
    run(params, grads, own := wrapped(params))
    run(twins, grads, other := fused(twins))
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=tolerance, atol=tolerance)
    assert float(own.exp_avg_sq_mean) == pytest.approx(float(other.exp_avg_sq_mean), rel=tolerance)
    assert own.effective_weight_decay() == pytest.approx(other.effective_weight_decay(), rel=tolerance)


def test_each_group_decays_by_its_own_lambda() -> None:
    params = random_params([(9,), (5,)], torch.float64)
    twins = copy.deepcopy(params)
    grads = random_grads([(9,), (5,)], 10, torch.float64)
    lambdas = (1e-2, 1e-3)
    own = [{"params": [param], LAMBDA: value} for param, value in zip(params, lambdas, strict=True)]
    others = [{"params": [param], "weight_decay": value} for param, value in zip(twins, lambdas, strict=True)]
    run(params, grads, ScheduledWeightDecay(torch.optim.Adam(own)))
    run(twins, grads, FusedAdamS(others))
    torch.testing.assert_close(params, twins, rtol=1e-13, atol=1e-13)


def test_complex_parameters_count_as_pairs_of_reals() -> None:
    start = torch.randn(6, dtype=torch.complex128)
    grads = [torch.randn(6, dtype=torch.complex128) for _ in range(10)]
    params = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())]
    optimizers = [ScheduledWeightDecay(torch.optim.Adam(params[:1]), 1e-2), FusedAdamS(params[1:], weight_decay=1e-2)]
    for grad in grads:
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-13, atol=1e-13)


def test_zero_gradients_change_nothing() -> None:
    params = random_params([(3, 2)])
    before = params[0].detach().clone()
    run(params, [[torch.zeros(3, 2)]] * 3, ScheduledWeightDecay(torch.optim.Adam(params)))
    assert torch.equal(params[0], before)


def test_max_decay_binds_and_says_so_once() -> None:
    params = [torch.nn.Parameter(torch.ones(4, dtype=torch.float64))]
    optimizer = ScheduledWeightDecay(torch.optim.SGD(params, lr=1.0), weight_decay=1.0, max_decay=0.2)
    grads = [[torch.full((4,), 1e-6, dtype=torch.float64)]] * 2
    with pytest.warns(UserWarning, match=r"max_decay=0\.2 binds .* rms gradient.* a larger max_decay=") as caught:
        run(params, grads, optimizer)
    assert len(caught) == 1
    torch.testing.assert_close(params[0].detach(), torch.full((4,), 0.8**2, dtype=torch.float64), rtol=1e-5, atol=0)


# --- With others


def by_hand(params: list[Tensor], grads: list[list[Tensor]], optimizer: torch.optim.Optimizer, decay: float) -> None:
    """The schedule written out, before each step of an optimizer without decay."""
    average = np.longdouble(0)
    count = sum(p.numel() for p in params)
    for step, step_grads in enumerate(grads, 1):
        square = sum((to_numpy(grad) ** 2).sum() for grad in step_grads)
        average = np.longdouble(0.999) * average + (1 - np.longdouble(0.999)) * square
        mean = average / (1 - np.longdouble(0.999) ** step) / count
        lr = optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            for param, grad in zip(params, step_grads, strict=True):
                param.mul_(float(1 - lr * decay / (np.sqrt(mean) + np.longdouble(1e-8))))
                param.grad = grad.clone()
        optimizer.step()


CANNOT_BE_WRAPPED = {
    torch.optim.Optimizer: "the base class has no step",
    torch.optim.LBFGS: "evaluates a closure many times within a step",
    torch.optim.SparseAdam: "takes sparse gradients only",
}
TORCHS_OWN = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind not in CANNOT_BE_WRAPPED
]


@pytest.mark.parametrize("kind", TORCHS_OWN, ids=lambda kind: kind.__name__)
def test_takes_over_the_decay_of_every_optimizer_of_torch(kind: Any) -> None:
    shapes = [(30, 4), (11, 4)]  # Muon takes matrices only
    params = random_params(shapes, torch.float64)
    twins = copy.deepcopy(params)
    grads = random_grads(shapes, 5, torch.float64)
    has_decay = "weight_decay" in kind(params, lr=1e-2).param_groups[0]
    with_its_own, without = ({"lr": 1e-2, **({"weight_decay": decay} if has_decay else {})} for decay in (0.3, 0.0))
    wrapped_one = kind(params, **with_its_own)
    run(params, grads, ScheduledWeightDecay(wrapped_one, weight_decay=1e-2))
    assert [group.get("weight_decay", 0.0) for group in wrapped_one.param_groups] == [0.0]
    by_hand(twins, grads, kind(twins, **without), 1e-2)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-8, atol=1e-8)  # their eps differ, up to Adadelta's 1e-6


def test_torchs_optimizers_are_found() -> None:
    assert {torch.optim.Adafactor, torch.optim.Muon, torch.optim.SGD} < set(TORCHS_OWN)
    assert len(TORCHS_OWN) >= 13


def lambdas(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group[LAMBDA] for group in ScheduledWeightDecay(optimizer, 7e-4).param_groups]


def test_groups_that_the_wrapped_optimizer_does_not_decay_stay_without() -> None:
    a, b = random_params([(2,), (3,)])
    assert lambdas(torch.optim.AdamW([{"params": [a]}, {"params": [b], "weight_decay": 0.0}])) == [7e-4, 0.0]
    assert lambdas(torch.optim.Adam([{"params": [a]}, {"params": [b]}])) == [7e-4, 7e-4]
    assert lambdas(torch.optim.Adam([{"params": [a]}, {"params": [b], LAMBDA: 0.1}])) == [7e-4, 0.1]


def of_decays(*decays: float, kind: Any = torch.optim.AdamW, **entries: Any) -> torch.optim.Optimizer:
    """An optimizer with a group for each decay."""
    params = random_params([(2,)] * len(decays))
    pairs = zip(params, decays, strict=True)
    return kind([{"params": [param], "weight_decay": decay, **entries} for param, decay in pairs], lr=1e-3)


def test_one_lambda_for_decays_that_differ_is_refused() -> None:
    optimizer = of_decays(1e-5, 2e-5, 0.0, 1e-3)
    with pytest.raises(ValueError, match=r"differs: \[1e-05, 2e-05, 0\.001\]\. Pass weight_decay=None"):
        ScheduledWeightDecay(optimizer, 7e-4)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-5, 2e-5, 0.0, 1e-3]


def test_without_a_number_each_group_keeps_its_own() -> None:
    wrapped_one = of_decays(1e-5, 2e-5, 0.0, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = ScheduledWeightDecay(wrapped_one, weight_decay=None)
        of_given = ScheduledWeightDecay(of_decays(1e-5, 2e-5, **{LAMBDA: 3e-4}))
    assert [group[LAMBDA] for group in optimizer.param_groups] == [1e-5, 2e-5, 0.0, 1e-3]
    assert [group["weight_decay"] for group in wrapped_one.param_groups] == [0.0] * 4
    assert [group[LAMBDA] for group in of_given.param_groups] == [3e-4, 3e-4]


@pytest.mark.parametrize("remade", [lambda it: it, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_groups_added_later_get_lambda(remade: Any) -> None:
    cases = [(7e-4, of_decays(1e-3), 7e-4), (None, of_decays(1e-3), 2e-5), (7e-4, of_decays(0.0), 7e-4)]
    for weight_decay, optimizer, expected in cases:
        own = remade(ScheduledWeightDecay(optimizer, weight_decay))
        a, b, c = random_params([(2,)] * 3)
        own.add_param_group({"params": [a], "weight_decay": 2e-5})
        own.add_param_group({"params": [b], "weight_decay": 0.0})
        own.add_param_group({"params": [c], "weight_decay": 0.3, LAMBDA: 1e-6})
        assert [group[LAMBDA] for group in own.param_groups[1:]] == [expected, 0.0, 1e-6]
        assert all(group["weight_decay"] == 0 for group in own.param_groups)
