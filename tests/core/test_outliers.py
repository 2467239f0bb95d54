"""Steps whose gradient norm stands out: judged by the rule in floats, and by ZClip's."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS, FusedAdamW, outliers
from swd_fused.outliers import KEY
from tests.device import DEVICE
from tests.outliers_definition import WRONG, Rule, ZClip
from tests.runs import everything, fused, random_params, run

Params = list[torch.nn.Parameter]
Options = dict[str, Any]

SHAPES = [(6,), (10,)]
ONE_BUCKET = [{"params": [0, 1], "betas": (0.0, 0.9)}]
TWO_BUCKETS = [{"params": [0], "betas": (0.0, 0.9), "amsgrad": True}, {"params": [1], "betas": (0.0, 0.9)}]
MEASURED = 25


def norms_for(mode: str) -> list[float]:
    """Ordinary ones; single ones that stand out, NaN and 0; and from step 45 on another regime."""
    rng = random.Random(5)
    norms = [rng.lognormvariate(0, 0.2) * (1 if t < 45 else 40) for t in range(70)]
    norms[10] *= 5  # within the steps that only measure
    for t, factor in ((25, 9), (31, 12), (32, 100), (40, 4)):
        norms[t] *= factor
    norms[34], norms[36] = 0.0, math.nan if mode == "skip" else 1.0
    return norms


def of_norm(norm: float) -> list[Tensor]:
    return [torch.full(shape, norm / 4, dtype=torch.float64) for shape in SHAPES]


def float64_params() -> Params:
    return random_params(SHAPES, torch.float64)


def taken_norms(optimizer: FusedAdamS, params: Params, norms: Sequence[float]) -> list[float]:
    """Returns the norm of the gradients that each step has taken, 0 where it has changed nothing: with a beta1 of 0 the
    first moment is the clipped gradient."""
    found = []
    for norm in norms:
        before = [param.detach().clone() for param in params]
        for param in params:
            if optimizer.state[param]:
                optimizer.state[param]["exp_avg"].zero_()
        run(params, [of_norm(norm)], optimizer)
        moments = [optimizer.state[param]["exp_avg"] for param in params]
        found.append(float(torch.cat([moment.flatten() for moment in moments]).norm()))
        has_moved = not all(map(torch.equal, params, before))
        assert has_moved == (found[-1] != 0 or norm == 0)
    return found


def close(found: list[float], wanted: list[float], tolerance: float = 3e-12) -> bool:
    return all(abs(one - other) <= tolerance * other for one, other in zip(found, wanted, strict=True))


def smaller(norms: list[float], taken: list[float], max_grad_norm: float) -> list[float]:
    """Returns the smaller of both limits, that of max_grad_norm with the 1e-6 of clip_grad_norm_."""
    pairs = zip(norms, taken, strict=True)
    return [min(limit, norm * max_grad_norm / (norm + 1e-6)) for norm, limit in pairs]


# --- The rule


@pytest.mark.parametrize("mode", ["skip", "clip"])
@pytest.mark.parametrize("groups", [ONE_BUCKET, TWO_BUCKETS], ids=["one bucket", "two buckets"])
def test_equals_the_rule(backend: str, groups: list[Options], mode: Any) -> None:
    params, norms = float64_params(), norms_for(mode)
    optimizer = fused(params, groups, backend=backend, outliers=mode, lr=1e-6)
    found = taken_norms(optimizer, params, norms)

    rule = Rule(mode)
    assert close(found, [rule.step(norm) for norm in norms])
    assert found[MEASURED] != norms[MEASURED]
    for wrong in WRONG[mode]:
        other = copy.copy(wrong)
        assert not close(found, [other.step(norm) for norm in norms], 1e-9), wrong
    metrics = optimizer.metrics()
    assert metrics["outlier_share"] == rule.found / rule.steps
    assert metrics["outlier_threshold"] == pytest.approx(rule.threshold(), rel=1e-12)
    assert metrics["skipped_steps"] == found.count(0.0) - 1  # one norm is 0
    if mode == "skip":
        assert found[45:56] == [0.0] * 10 + found[55:56]
        assert found[55] > 0


def test_equals_zclip() -> None:
    params, norms = float64_params(), [norm or 1.0 for norm in norms_for("clip")]
    optimizer = fused(params, ONE_BUCKET, outliers="clip", outlier_sigma=2.5, lr=1e-6)
    zclip, found = ZClip(2.5), taken_norms(optimizer, params, norms)
    assert close(found, [zclip.step(norm) for norm in norms], 1e-4)  # it has no least deviation
    assert sum(norm - clipped > 1e-3 for norm, clipped in zip(norms, found, strict=True)) >= 5


def test_norms_that_differ_by_rounding_do_not_stand_out() -> None:
    params = float64_params()
    optimizer = fused(params, ONE_BUCKET, outliers="skip")
    run(params, [of_norm(1.0)] * 30 + [of_norm(1 + 1e-9)] * 3, optimizer)
    assert optimizer.metrics()["outlier_share"] == 0
    run(params, [of_norm(1.001)], optimizer)
    assert int(optimizer.skipped_steps) == 1


def test_of_both_limits_the_smaller_counts(backend: str) -> None:
    params, norms = float64_params(), norms_for("clip")[:45]
    optimizer = fused(params, ONE_BUCKET, backend=backend, outliers="clip", max_grad_norm=1.3, lr=1e-6)
    rule = Rule("clip")
    wanted = smaller(norms, [rule.step(norm) for norm in norms], 1.3)
    assert close(taken_norms(optimizer, params, norms), wanted)
    assert optimizer.metrics()["clipped_share"] > optimizer.metrics()["outlier_share"] > 0


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize("skips", [True, False])
def test_bad_norms_leave_the_averages_alone(backend: str, skips: bool) -> None:
    params = float64_params()
    optimizer = fused(params, ONE_BUCKET, backend=backend, outliers="clip", skip_nonfinite=skips)
    run(params, [of_norm(norm) for norm in (1.0, math.nan, 3.0, math.inf, 0.0)], optimizer)
    numbers = optimizer.param_groups[0][KEY]
    assert numbers.tolist() == pytest.approx([2.0, 1.0, 2, 0, 0, 2])
    assert int(optimizer.skipped_steps) == 2 * skips


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize("mode", ["skip", "clip"])
def test_unscaled_norms_count_and_steps_skipped_by_the_scaler_do_not(backend: str, mode: Any) -> None:
    params = float64_params()
    optimizer = fused(params, ONE_BUCKET, backend=backend, outliers=mode)
    twins = copy.deepcopy(params)
    plain = fused(twins, ONE_BUCKET, backend=backend, outliers=mode)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
    for norm in [*norms_for("clip")[:28], math.inf, 1.0, 90.0, 1.0]:
        scale = scaler.get_scale()
        for param, grad in zip(params, of_norm(norm), strict=True):
            param.grad = grad * scale
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        if math.isfinite(norm):
            run(twins, [of_norm(norm)], plain)
    assert all(map(torch.equal, params, twins))
    assert torch.equal(optimizer.param_groups[0][KEY], plain.param_groups[0][KEY])
    assert optimizer.metrics()["outlier_share"] > 0


@pytest.mark.parametrize("mode", ["skip", "clip"])
def test_a_step_in_parts_is_decided_once(backend: str, mode: Any) -> None:
    """As DeepSpeed takes it: each call knows the sum of the whole model."""
    params = float64_params()
    twins = copy.deepcopy(params)
    options = {"backend": backend, "outliers": mode, "decay": "decoupled"}
    optimizer, whole = fused(params, ONE_BUCKET, **options), fused(twins, ONE_BUCKET, **options)
    for norm in norms_for(mode)[:34]:
        grads = of_norm(norm)
        for index, grad in enumerate(grads):
            params[index].grad, params[1 - index].grad = grad, None
            optimizer.step(grad_sumsq=norm**2, numel=16)
        run(twins, [grads], whole)
    torch.testing.assert_close(params, twins, rtol=1e-9, atol=0)
    torch.testing.assert_close(optimizer.param_groups[0][KEY], whole.param_groups[0][KEY], rtol=1e-9, atol=0)
    assert whole.metrics()["outlier_share"] > 0


# --- What is carried


def loaded(params: Params, optimizer: FusedAdamS) -> tuple[Params, FusedAdamS]:
    twins = copy.deepcopy(params)
    fresh = FusedAdamS(twins, lr=0.0, outliers="skip", backend=optimizer.backend)
    run(twins, [of_norm(7.0)], fresh)  # numbers of its own, which are lost
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twins, fresh


AGAIN = [loaded, lambda *both: copy.deepcopy(both), lambda *both: pickle.loads(pickle.dumps(both))]


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize("again", AGAIN, ids=["state dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("half", [12, 50])
def test_resumed_to_the_bit(backend: str, again: Callable[[Params, FusedAdamS], Any], half: int) -> None:
    """Within the steps that only measure, and within a row of skips."""
    params, grads = float64_params(), [of_norm(norm) for norm in norms_for("skip")]
    optimizer = FusedAdamS(params, outliers="skip", backend=backend)  # type: ignore[arg-type]
    run(params, grads[:half], optimizer)
    others, resumed = again(params, optimizer)
    numbers = resumed.param_groups[0][KEY]
    run(params, grads[half:], optimizer)
    run(others, grads[half:], resumed)
    assert all(map(torch.equal, everything(optimizer, params), everything(resumed, others)))
    assert torch.equal(optimizer.param_groups[0][KEY], numbers)
    assert resumed.param_groups[0][KEY] is numbers, "in place, as a CUDA graph needs it"


@pytest.mark.parametrize("foreign", [FusedAdamW, torch.optim.AdamW])
def test_a_state_dict_without_numbers_starts_anew(foreign: type[torch.optim.Optimizer]) -> None:
    params = float64_params()
    optimizer, other = FusedAdamW(params, outliers="skip"), foreign(copy.deepcopy(params))
    run(other.param_groups[0]["params"], [of_norm(1.0)], other)
    run(params, [of_norm(1.0)] * 30, optimizer)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.metrics()["outlier_threshold"] == math.inf
    run(params, [of_norm(50.0)] * MEASURED, optimizer)
    assert int(optimizer.skipped_steps) == 0
    run(params, [of_norm(60.0)], optimizer)
    assert int(optimizer.skipped_steps) == 1
    other.load_state_dict(optimizer.state_dict())
    run(other.param_groups[0]["params"], [of_norm(1.0)], other)


def test_damaged_numbers_are_refused_before_anything_is_written() -> None:
    params = float64_params()
    optimizer = FusedAdamW(params, outliers="skip")
    run(params, [of_norm(1.0)], optimizer)
    before = copy.deepcopy(params)
    optimizer.param_groups[0][KEY] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"got {KEY}=.*, wanted the 6 numbers"):
        run(params, [of_norm(1.0)], optimizer)
    assert all(map(torch.equal, params, before))


def test_set_later(backend: str) -> None:
    params, norms = float64_params(), norms_for("clip")[:45]
    optimizer = fused(params, ONE_BUCKET, backend=backend, lr=1e-6)
    assert taken_norms(optimizer, params, [50.0]) == pytest.approx([50.0])
    assert "outlier_share" not in optimizer.metrics()
    optimizer.outliers, optimizer.outlier_sigma = "clip", 4
    assert math.isnan(optimizer.metrics()["outlier_share"])
    rule = Rule("clip", 4)
    assert close(taken_norms(optimizer, params, norms), [rule.step(norm) for norm in norms])
    optimizer.outliers = None
    assert taken_norms(optimizer, params, [50.0]) == pytest.approx([50.0])


PRECISIONS: list[tuple[torch.dtype, Options]] = [
    (torch.float32, {"state_dtype": "8bit", "cautious_decay": True, "decay": "decoupled"}),
    (torch.bfloat16, {"master_weights": True, "ema_decay": 0.9}),
    (torch.float32, {"amsgrad": True, "decay": "l2", "max_grad_norm": 2.0}),
]


@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize(("dtype", "options"), PRECISIONS, ids=str)
def test_a_skipped_step_changes_nothing(
    backend: str, dtype: torch.dtype, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outliers, "MEASURED_STEPS", 3)
    params = random_params([(300,), (3, 40)], dtype)
    optimizer = FusedAdamS(params, outliers="skip", backend=backend, **options)
    grads = [[torch.ones_like(param) for param in params] for _ in range(4)]
    run(params, grads, optimizer)
    before = everything(optimizer, params)
    run(params, [[grad * 90 for grad in grads[0]]], optimizer)
    assert int(optimizer.skipped_steps) == 1
    assert all(map(torch.equal, before, everything(optimizer, params)))
    run(params, grads[:1], optimizer)
    assert not torch.equal(params[0], before[0])
