"""The scheduler by itself: with Adam it is FusedAdamS, with others it decays by the same schedule."""

from __future__ import annotations

import copy
import inspect
import io
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
    """Fused it decays within its own kernel, else before."""
    params = random_params(SHAPES, torch.float64)
    grads = coming_and_going(random_grads(SHAPES, STEPS, torch.float64))
    reference = defined(params, grads)
    run(params, grads, wrapped(params, kind, **{implementation: True}))
    assert error(params, reference.params) < 1e-14


def fused_adam(params: list[torch.nn.Parameter], **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, fused=True, **options)


def test_a_fused_optimizer_gets_its_groups_back() -> None:
    params = random_params([(4,), (3,)])
    adam = torch.optim.Adam([{"params": params[:1]}, {"params": params[1:], LAMBDA: 0.0}], fused=True)
    optimizer = ScheduledWeightDecay(adam, weight_decay=1e-3)
    seen: list[list[tuple[float, bool]]] = []

    def entries(*_: Any) -> None:
        seen.append([(group["weight_decay"], group["decoupled_weight_decay"]) for group in adam.param_groups])

    adam.register_step_pre_hook(entries)
    run(params, [[torch.full((4,), 0.1), torch.full((3,), 0.1)]], optimizer)
    entries()
    assert seen == [[(pytest.approx(1e-2, rel=1e-6), True), (0.0, False)], [(0.0, False), (0.0, False)]]

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    adam.register_step_post_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    entries()
    assert seen[-1] == [(0.0, False), (0.0, False)]


def test_a_decay_that_somebody_sets_in_a_fused_optimizer_is_obeyed() -> None:
    params = random_params([(30,)], torch.float64)
    twins = copy.deepcopy(params)
    optimizers = [
        ScheduledWeightDecay(torch.optim.Adam(list_, fused=fused), 1e-3)
        for list_, fused in ((params, True), (twins, False))
    ]
    grads = random_grads([(30,)], 5, torch.float64)
    for list_, optimizer in zip((params, twins), optimizers, strict=True):
        optimizer.param_groups[0]["weight_decay"] = 0.3
        run(list_, grads, optimizer)
    torch.testing.assert_close(params, twins, rtol=1e-12, atol=1e-13)


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


@pytest.mark.parametrize(
    "build",
    [
        lambda p, **decay: torch.optim.SGD(p, lr=1e-2, momentum=0.9, **decay),
        lambda p, **decay: torch.optim.RAdam(p, lr=1e-2, **decay),
        lambda p, **decay: torch.optim.RMSprop(p, lr=1e-3, **decay),
        lambda p, **decay: torch.optim.AdamW(p, lr=1e-2, **{"weight_decay": 0.0, **decay}),
    ],
    ids=["SGD", "RAdam", "RMSprop", "AdamW"],
)
def test_takes_over_the_decay_of_any_optimizer(build: Any) -> None:
    shapes = [(30, 4), (11,)]
    params = random_params(shapes, torch.float64)
    twins = copy.deepcopy(params)
    grads = random_grads(shapes, 20, torch.float64)
    with_its_own = build(params, weight_decay=0.3)
    optimizer = ScheduledWeightDecay(with_its_own, weight_decay=1e-2)
    run(params, grads, optimizer)
    by_hand(twins, grads, build(twins), 1e-2)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-12, atol=1e-13)
    assert [group["weight_decay"] for group in with_its_own.param_groups] == [0.0]


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
def test_every_optimizer_of_torch_can_be_wrapped(kind: Any) -> None:
    shapes = [(30, 4), (11, 4)]  # Muon takes matrices only
    params = random_params(shapes, torch.float64)
    twins = copy.deepcopy(params)
    grads = random_grads(shapes, 5, torch.float64)
    run(params, grads, ScheduledWeightDecay(kind(params, lr=1e-2), weight_decay=1e-2))
    without_decay = kind(twins, lr=1e-2)
    for group in without_decay.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    by_hand(twins, grads, without_decay, 1e-2)
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


def test_decays_that_differ_keep_their_ratio() -> None:
    with pytest.warns(UserWarning, match=r"differs: 0\.001, 2e-05, 1e-05\. Lambda is 0\.0007 .* weight_decay=None"):
        assert lambdas(of_decays(1e-5, 2e-5, 0.0, 1e-3)) == pytest.approx([7e-6, 1.4e-5, 0.0, 7e-4])


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
def test_lambda_of_groups_added_later_follows_from_their_decay(remade: Any) -> None:
    cases = [(7e-4, of_decays(1e-3), 1.4e-5), (None, of_decays(1e-3), 2e-5), (7e-4, of_decays(0.0), 7e-4)]
    for weight_decay, optimizer, expected in cases:
        own = remade(ScheduledWeightDecay(optimizer, weight_decay))
        a, b, c = random_params([(2,)] * 3)
        own.add_param_group({"params": [a], "weight_decay": 2e-5})
        own.add_param_group({"params": [b], "weight_decay": 0.0})
        own.add_param_group({"params": [c], "weight_decay": 0.3, LAMBDA: 1e-6})
        assert [group[LAMBDA] for group in own.param_groups[1:]] == [pytest.approx(expected), 0.0, 1e-6]
        assert all(group["weight_decay"] == 0 for group in own.param_groups)


# --- Used like the optimizer that it wraps


class Averaging(torch.optim.SGD):
    """An optimizer with more than torch's methods, as those that are free of schedules have."""

    is_training = False
    max_decay = "its own"

    def train(self) -> None:
        self.is_training = True


def test_what_it_lacks_is_the_wrapped_optimizers() -> None:
    optimizer = ScheduledWeightDecay(Averaging(random_params([(2,)]), lr=0.1))
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not one.is_training
        one.train()
        assert one.is_training
        assert one.optimizer.is_training
        assert one.param_groups is one.optimizer.param_groups
        with pytest.raises(AttributeError, match="'Averaging' object has no attribute 'eval'"):
            one.eval()
        with pytest.raises(AttributeError, match="'ScheduledWeightDecay' object has no attribute '_private'"):
            _ = one._private
    with pytest.raises(AttributeError, match="'optimizer'"):
        _ = ScheduledWeightDecay.__new__(ScheduledWeightDecay).optimizer


def test_grad_scaler_does_not_take_it_for_a_fused_optimizer() -> None:
    """GradScaler leaves the scale in gradients if `_step_supports_amp_scaling`."""
    params = random_params([(40,)], torch.float64)
    twins = copy.deepcopy(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [ScheduledWeightDecay(fused_adam(list_), 1e-2) for list_ in (params, twins)]
    for (grad,) in random_grads([(40,)], 5, torch.float64):
        scaler.scale((params[0] * grad).sum()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        twins[0].grad = grad.clone()
        optimizers[1].step()
    torch.testing.assert_close(params, twins, rtol=1e-12, atol=1e-13)


def test_learning_rate_schedulers_and_closures_work() -> None:
    params = random_params([(4,)])
    optimizer = ScheduledWeightDecay(torch.optim.Adam(params, lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    def closure() -> float:
        params[0].grad = torch.ones(4)
        return 5.0

    assert optimizer.step(closure) == 5.0
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer.zero_grad()
    assert params[0].grad is None
    assert optimizer.state[params[0]]["step"] == 1


def test_a_tensor_learning_rate_is_followed() -> None:
    params = random_params([(4,)], torch.float64)
    twins = copy.deepcopy(params)
    lr = torch.tensor(1e-2)
    optimizer = ScheduledWeightDecay(torch.optim.Adam(params, lr=lr, foreach=False, capturable=False), 1e-2)
    twin = ScheduledWeightDecay(torch.optim.Adam(twins, lr=1e-2), 1e-2)
    for factor in (1.0, 0.5):
        lr.mul_(factor)
        twin.param_groups[0]["lr"] *= factor
        grads = random_grads([(4,)], 1, torch.float64)
        run(params, grads, optimizer)
        run(twins, grads, twin)
    torch.testing.assert_close(params[0], twins[0], rtol=1e-7, atol=1e-8)


def test_groups_added_later_decay_too() -> None:
    a, b = random_params([(2,), (3,)])
    optimizer = ScheduledWeightDecay(torch.optim.AdamW([a]), 1e-3)
    optimizer.add_param_group({"params": [b], "lr": 0.5})
    assert optimizer.optimizer.param_groups[1][LAMBDA] == 1e-3
    assert optimizer.optimizer.param_groups[1]["weight_decay"] == 0.0
    assert len(optimizer.param_groups) == 2


def halves(dtype: torch.dtype = torch.float32) -> tuple[list[torch.nn.Parameter], list[list[Tensor]], list[Tensor]]:
    """Parameters, gradients, and what the whole run makes of a copy of them."""
    params = random_params(SHAPES, dtype)
    grads = random_grads(SHAPES, STEPS, dtype)
    whole = copy.deepcopy(params)
    run(whole, grads, wrapped(whole))
    return params, grads, [param.detach() for param in whole]


def same(params: list[torch.nn.Parameter], expected: list[Tensor]) -> bool:
    return all(torch.equal(param, other) for param, other in zip(params, expected, strict=True))


def test_a_resumed_run_has_the_same_bits() -> None:
    params, grads, expected = halves()
    first = wrapped(params)
    run(params, grads[:20], first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = wrapped(params)
    second.load_state_dict(torch.load(file, weights_only=True))
    run(params, grads[20:], second)
    assert same(params, expected)


def test_a_resumed_run_of_an_optimizer_without_second_moments_keeps_its_averages() -> None:
    params = random_params([(9,)], torch.float64)
    whole = copy.deepcopy(params)
    grads = random_grads([(9,)], 20, torch.float64)
    run(whole, grads, ScheduledWeightDecay(torch.optim.SGD(whole, lr=0.1, momentum=0.9), 1e-2))
    first, second = (ScheduledWeightDecay(torch.optim.SGD(params, lr=0.1, momentum=0.9), 1e-2) for _ in range(2))
    run(params, grads[:10], first)
    second.load_state_dict(first.state_dict())
    run(params, grads[10:], second)
    assert torch.equal(params[0], whole[0])


def test_copies_and_pickles_go_on_alike() -> None:
    params, grads, expected = halves()
    first = wrapped(params)
    run(params, grads[:20], first)
    for remade in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        own = [param for group in remade.param_groups for param in group["params"]]
        assert remade.param_groups is remade.optimizer.param_groups
        run(own, grads[20:], remade)
        assert same(own, expected)


def test_adams_state_is_taken_over_and_given_back() -> None:
    """A run that begins as plain Adam: the averages follow from its second moments."""
    params = random_params([(9,), (2, 2)], torch.float64)
    grads = random_grads([(9,), (2, 2)], 20, torch.float64)
    adam = torch.optim.Adam(params, weight_decay=0.0)
    run(params, grads[:10], adam)
    twins = copy.deepcopy(params)
    own = ScheduledWeightDecay(torch.optim.Adam(params), 1e-2)
    own.load_state_dict(adam.state_dict())
    other = FusedAdamS(twins, weight_decay=1e-2)
    with pytest.warns(UserWarning, match="for Adam's L2 regularization"):
        other.load_state_dict(adam.state_dict())
    run(params, grads[10:], own)
    run(twins, grads[10:], other)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-13, atol=1e-13)
    torch.optim.Adam(params).load_state_dict(own.state_dict())


@pytest.mark.parametrize("has_steps", [True, False])
def test_averages_that_begin_anew_say_so(has_steps: bool) -> None:
    params = random_params([(9,), (4,)])
    plain = torch.optim.RMSprop(params)
    if has_steps:
        run(params, [[torch.ones(9), None]], plain)
    own = ScheduledWeightDecay(torch.optim.RMSprop(params))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.load_state_dict(plain.state_dict())
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == has_steps
    if has_steps:
        assert "1 of its parameters have only square_avg, step: their averages begin anew" in messages[0]
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.load_state_dict(own.state_dict())


@pytest.mark.parametrize("name", ["exp_avg_sq", "variance_ma"])
def test_second_moments_and_steps_are_found_where_others_keep_them(name: str) -> None:
    params = random_params([(9,)], torch.float64)
    own = ScheduledWeightDecay(torch.optim.SGD(params, lr=0.1))
    saved = torch.optim.SGD(params, lr=0.1).state_dict()
    saved["state"][0] = {name: torch.full((9,), 0.5, dtype=torch.float64)}
    saved["param_groups"][0]["step"] = 3
    own.load_state_dict(saved)
    assert own.state_dict()["averages"] == {0: {"exp_avg_sq_sum": torch.tensor(4.5), "step": 3}}


# --- Refusals


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: ScheduledWeightDecay(torch.nn.Linear(1, 1)), "wanted a torch optimizer"),
        (lambda p: ScheduledWeightDecay(FusedAdamS(p)), "schedules its decay already"),
        (lambda p: ScheduledWeightDecay(torch.optim.LBFGS(p)), "LBFGS"),
        (lambda p: ScheduledWeightDecay(torch.optim.Adam(p), weight_decay=-1), "weight_decay"),
        (lambda p: ScheduledWeightDecay(torch.optim.Adam(p), max_decay=0), "max_decay"),
        (lambda p: ScheduledWeightDecay(torch.optim.Adam(p), weight_decay=None), "no group decays"),
    ],
)
def test_what_cannot_work_is_refused(build: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build(random_params([(2,)]))


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = ScheduledWeightDecay(torch.optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
