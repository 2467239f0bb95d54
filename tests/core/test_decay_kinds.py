"""The kinds of decay share the kernels. Corrected and independent decay are judged by torch's optimizers,
too, with a `weight_decay` that is set by hand in each step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.runs import (
    SHAPES,
    fused,
    is_interpreted,
    random_grads,
    random_params,
    run,
    set_grads,
    shapes_for,
    twins_of,
)

Options = dict[str, Any]

# Of a warm-up, a second peak below the first one, and an end at zero.
SHARES = [0.1, 0.6, 1.0, 0.7, 0.2, 0.5, 0.0, 0.3]
SCHEDULED: Options = {"weight_decay": 0.05}
CORRECTED: Options = {"corrected_decay": True}
CAUTIOUS: Options = {"cautious_decay": True}
ADAMC: Options = {"decay": "decoupled", "weight_decay": 0.5, **CORRECTED}
INDEPENDENT: Options = {"decay": "independent", "weight_decay": 0.01}


def steps_of(backend: str) -> list[float]:
    return SHARES[1:6] if is_interpreted(backend) else SHARES


# --- Twins that nobody here wrote


@pytest.mark.parametrize("options", [ADAMC, INDEPENDENT, {**INDEPENDENT, "amsgrad": True}], ids=str)
def test_equals_adamw_with_a_callback_that_sets_its_decay(backend: str, options: Options) -> None:
    shapes, shares = shapes_for(backend), [share for share in steps_of(backend) if share]
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, len(shares), torch.float64)
    twins = twins_of(params)
    optimizer = FusedAdamS(params, lr=0.1, backend=backend, **options)
    adamw = torch.optim.AdamW(twins, amsgrad=options.get("amsgrad", False))
    largest = 0.0
    for share, step_grads in zip(shares, grads, strict=True):
        lr = 0.1 * share
        largest = max(largest, lr)
        optimizer.param_groups[0]["lr"] = lr
        by_hand = options["weight_decay"] * (lr / largest if options is ADAMC else 1 / largest)
        adamw.param_groups[0].update(lr=lr, weight_decay=by_hand)
        set_grads(params, step_grads)
        set_grads(twins, step_grads)
        optimizer.step()
        adamw.step()
        assert optimizer.effective_weight_decay() == pytest.approx([by_hand])
        assert optimizer.metrics()["decay_timescale/0"] == pytest.approx(1 / (lr * by_hand))
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1e-21, 1.0])
def test_signs_are_compared_where_a_product_would_vanish(backend: str, size: float) -> None:
    """And an update of zero agrees: what has no gradient decays."""
    param = torch.nn.Parameter(size * torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0]))
    grad = 1e-25 * torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 1.0])
    options: Options = {"decay": "decoupled", "lr": 1e-3, "weight_decay": 500.0, "eps": 1.0, **CAUTIOUS}
    run([param], [[grad]], FusedAdamS([param], backend=backend, **options))
    torch.testing.assert_close(param.detach() / size, torch.tensor([0.5, 1.0, -1.0, -0.5, 0.5, -0.5, 0.0]))


# --- The largest learning rate


def trained(options: Options, lrs: list[float], new_lr: Callable[..., Any] = float) -> Any:
    """Returns an optimizer and its parameters after some steps."""
    shapes = [(40,), (5, 7)]
    params, grads = random_params(shapes), random_grads(shapes, len(lrs))
    optimizer = FusedAdamS(params, lr=new_lr(lrs[0]), **options)
    for lr, step_grads in zip(lrs, grads, strict=True):
        if isinstance(optimizer.param_groups[0]["lr"], Tensor):
            optimizer.param_groups[0]["lr"].fill_(lr)
        else:
            optimizer.param_groups[0]["lr"] = lr
        run(params, [step_grads], optimizer)
    return optimizer, params


LRS = [0.01 * share for share in SHARES]
kinds = pytest.mark.parametrize("options", [ADAMC, {**SCHEDULED, **CORRECTED}, INDEPENDENT], ids=str)


@pytest.mark.backends(interpreted=False)
@kinds
def test_a_tensor_is_followed_as_a_number_is(backend: str, options: Options) -> None:
    options = {**options, "backend": backend, "largest_lr": 0.007}
    _, params = trained(options, [float(torch.tensor(lr)) for lr in sorted(LRS)])
    torch.manual_seed(0)
    _, others = trained(options, sorted(LRS), torch.tensor)
    assert all(map(torch.equal, params, others))


@kinds
def test_a_tensor_needs_a_given_peak(options: Options) -> None:
    with pytest.raises(ValueError, match=r"lr=tensor\(0\.1000\) .* wanted largest_lr"):
        FusedAdamS(random_params([(5,)]), lr=torch.tensor(0.1), **options)


def test_a_number_may_become_a_tensor_and_back() -> None:
    optimizer, params = trained({**ADAMC, "largest_lr": 0.2}, [0.1, 0.05])
    group = optimizer.param_groups[0]
    for lr, largest in ((torch.tensor(0.2), 0.2), (0.1, 0.2), (torch.tensor(0.05), 0.2), (0.4, 0.4)):
        group["lr"] = lr
        run(params, random_grads([(40,), (5, 7)], 1), optimizer)
        assert optimizer.effective_weight_decay() == pytest.approx([0.5 * float(lr) / largest])


def test_only_steps_count() -> None:
    """Neither what a constructor gets nor what is looked at: schedulers begin with another learning rate."""
    params = random_params([(5,)])
    optimizer = FusedAdamS(params, lr=1.0, **ADAMC)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.1, 0.2, 0.4, 0.1][step])
    seen = []
    for _ in range(3):
        run(params, random_grads([(5,)], 1), optimizer)
        scheduler.step()
        optimizer.metrics()
        seen.append(optimizer.param_groups[0]["largest_lr_so_far"])
    assert seen == pytest.approx([0.1, 0.2, 0.4])
    plain = FusedAdamS(params, lr=1.0)
    run(params, random_grads([(5,)], 1), plain)
    assert plain.param_groups[0]["largest_lr_so_far"] == 0, "nobody asks for it"


def test_one_cycle_lr_keeps_its_own_key() -> None:
    params = random_params([(5,)])
    optimizer = FusedAdamS(params, **ADAMC)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    for step in range(5):
        run(params, random_grads([(5,)], 1), optimizer)
        correction = optimizer.effective_weight_decay()[0] / 0.5
        assert (correction == 1) == (step < 3), "while it warms up"
        scheduler.step()
    assert optimizer.param_groups[0]["max_lr"] == 0.5


def test_a_learning_rate_above_the_given_peak_counts() -> None:
    optimizer, _ = trained({**ADAMC, "largest_lr": 0.1}, [0.1, 0.05])
    assert optimizer.effective_weight_decay() == pytest.approx([0.5 * 0.5])
    optimizer, _ = trained({**ADAMC, "largest_lr": 0.1}, [0.1, 0.3, 0.15])
    assert optimizer.effective_weight_decay() == pytest.approx([0.5 * 0.5])


# --- Groups, and state dicts of others


@pytest.mark.parametrize("change", [CORRECTED, CAUTIOUS, {"largest_lr": 0.04}], ids=str)
def test_groups_that_change_are_obeyed_by_the_next_step(backend: str, change: Options) -> None:
    params, grads = random_params([(300,)]), random_grads([(300,)], 2)
    others = twins_of(params)
    options: Options = {**SCHEDULED, "lr": 0.02, "backend": backend, **(CORRECTED if "largest_lr" in change else {})}
    optimizer, other = FusedAdamS(params, **options), FusedAdamS(others, **options)
    run(params, grads[:1], optimizer)
    run(others, grads[:1], other)
    for own in (optimizer, other):
        own.param_groups[0]["lr"] = 0.01
    optimizer.param_groups[0].update(change)
    if "largest_lr_so_far" not in change:
        optimizer.param_groups[0]["largest_lr_so_far"] = 0.02
    run(params, grads[1:], optimizer)
    run(others, grads[1:], other)
    assert not torch.equal(params[0], others[0])
    for own in (optimizer, other):
        assert own.state[own.param_groups[0]["params"][0]]["step"] == 2


def test_how_weights_decay_is_not_loaded() -> None:
    """As the kind of decay is not; the largest learning rate so far is."""
    optimizer, params = trained({"decay": "decoupled", **CAUTIOUS, **CORRECTED}, [0.3, 0.1])
    other = FusedAdamS(twins_of(params), decay="decoupled", **CORRECTED)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["cautious_decay"] is False
    assert other.param_groups[0]["largest_lr_so_far"] == 0.3
    with pytest.warns(UserWarning, match="but this optimizer has decay='independent'"):
        FusedAdamS(twins_of(params), **INDEPENDENT).load_state_dict(optimizer.state_dict())
    adam = torch.optim.Adam(twins_of(params))
    adam.load_state_dict(optimizer.state_dict())
    FusedAdamS(twins_of(params), decay="l2").load_state_dict(adam.state_dict())


# --- What is reported, and what is combined


@pytest.mark.parametrize("calibrated", [False, True])
def test_calibration_starts_from_adamc(backend: str, calibrated: bool) -> None:
    """As long as it lasts weights decay as AdamC's; then the corrected schedule takes over without a jump."""
    params, grads = random_params([(60,)], torch.float64), random_grads([(60,)], 2, torch.float64)
    optimizer = FusedAdamS(params, lr=0.1, adamw_weight_decay=0.2, calibration_steps=2, backend=backend, **CORRECTED)
    twins = twins_of(params)
    adamc = FusedAdamS(twins, lr=0.1, decay="decoupled", weight_decay=0.2, backend=backend, **CORRECTED)
    for lr, step_grads in zip((0.1, 0.05), grads, strict=True):
        for own, tensors in ((optimizer, params), (adamc, twins)):
            own.param_groups[0]["lr"] = lr
            run(tensors, [step_grads], own)
    torch.testing.assert_close(params[0], twins[0], rtol=0, atol=1e-14)
    if calibrated:  # asking ends it
        assert optimizer.effective_weight_decay() == pytest.approx([0.1])
        assert optimizer.param_groups[0]["adamw_weight_decay"] is None


def test_the_warning_of_max_decay_knows_the_correction() -> None:
    """It would bind at the peak, but not where the decay is corrected."""
    params = random_params([(50,)])
    for largest, warns in ((None, True), (100.0, False)):
        optimizer = FusedAdamS(params, lr=1.0, weight_decay=1.0, largest_lr=largest, **CORRECTED)
        set_grads(params, [torch.full((50,), 0.5)])
        optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert any("max_decay" in str(warning.message) for warning in caught) == warns


# --- Defaults, and what apex has


def test_the_decay_is_that_of_the_peer_where_none_is_given() -> None:
    for decay, peer_class in {"decoupled": torch.optim.AdamW, "l2": torch.optim.Adam}.items():
        [given], [wanted] = (
            [group["weight_decay"] for group in optimizer.param_groups]
            for optimizer in (FusedAdamS(random_params(SHAPES), decay=decay), peer_class(random_params(SHAPES)))
        )
        assert given == wanted, decay
    assert FusedAdamS(random_params(SHAPES)).param_groups[0]["weight_decay"] == 5e-4, "the paper's"
    assert FusedAdamS(random_params(SHAPES), decay="independent").param_groups[0]["weight_decay"] == 0.01 * 1e-3


def test_a_given_sum_is_refused_where_only_some_groups_correct_bias() -> None:
    """apex keeps it in the group. It is loaded with the group."""
    params = random_params([(40,), (50,)])
    optimizer = fused(params, [{"params": [0]}, {"params": [1], "bias_correction": False}])
    other = FusedAdamS([{"params": [params[0]]}, {"params": [params[1]]}])
    other.load_state_dict(optimizer.state_dict())
    assert [group["bias_correction"] for group in other.param_groups] == [True, False]
    with pytest.raises(ValueError, match="different betas or bias_correction"):
        optimizer.step(grad_sumsq=1.0)


def test_apex_keywords_are_accepted() -> None:
    params = random_params([(5,)])
    optimizer = fused(
        params,
        [{"params": [0]}],
        bias_correction=True,
        adam_w_mode=False,
        capturable=True,
        master_weights=False,
    )
    assert optimizer.options.decay == "l2"
    assert "decay: l2" in repr(optimizer)
