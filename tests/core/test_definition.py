"""FusedAdamS is the paper's algorithm, with all kinds of decay and averages: judged by the definition, and by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.state.weights import AVERAGE
from tests import definition, runs
from tests.definition import AdamS, Group
from tests.runs import error, fused, moments, random_grads, random_params, run

STEPS = 40

# What the learning rates are times: a warm-up, a second peak below the first one, and zero.
LR_FACTORS = [0.6, 1.0, 0.7, 0.2, 0.5, 0.0, 0.3, 0.1]

CLIP = {"max_grad_norm": 1.0}
SCHEDULED = {"weight_decay": 0.05}
DECOUPLED = {"decay": "decoupled", "weight_decay": 0.5}
INDEPENDENT = {"decay": "independent", "weight_decay": 0.01}
CORRECTED, CAUTIOUS = {"corrected_decay": True}, {"cautious_decay": True}
AVERAGED = {"ema_decay": 0.6}

# Options of all groups, and of the first of two that differ in everything, of which only this one decays unless all do.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "amsgrad": ({"amsgrad": True}, {}),
    "maximize": ({"maximize": True}, AVERAGED),
    "clipped": (CLIP, {}),
    "all": ({**CLIP, "amsgrad": True, "maximize": True}, AVERAGED),
    "lagged": ({"schedule": "lagged"}, AVERAGED),
    "corrected": (SCHEDULED, CORRECTED),
    "AdamC": (DECOUPLED, CORRECTED),
    "AdamC, peak given": (DECOUPLED, {**CORRECTED, "largest_lr": 0.02}),
    "independent": (INDEPENDENT, {}),
    "l2": ({"decay": "l2", "weight_decay": 0.1}, {"maximize": True}),
    "independent, peak given": (INDEPENDENT, {"largest_lr": 0.02}),
    "cautious": (SCHEDULED, CAUTIOUS),
    "cautious but for the first": ({**SCHEDULED, **CAUTIOUS}, {"cautious_decay": False}),
    "cautious decoupled": (DECOUPLED, CAUTIOUS),
    "cautious independent, maximizing": (INDEPENDENT, {**CAUTIOUS, "maximize": True}),
    "variants, lagged": ({**SCHEDULED, "schedule": "lagged"}, {**CORRECTED, **CAUTIOUS}),
    "variants, amsgrad, clipped": ({**SCHEDULED, **CLIP, "amsgrad": True}, {**CORRECTED, **CAUTIOUS}),
    "bias of the second group only": ({}, {"bias_correction": False}),
    "no bias, lagged": ({"schedule": "lagged", "bias_correction": False}, {}),
    "averages": ({"ema_decay": 0.9, "ema_warmup": True}, {"ema_warmup": False, **AVERAGED}),
}


def apart_from_definition(backend: str, kind: str, judge: type[AdamS] = AdamS) -> float:
    """Gradients are missing now and then."""
    of_all, of_first = KINDS[kind]
    shapes, steps = runs.shapes_for(backend), runs.steps_for(backend, STEPS)
    given = [{key: value for key, value in group.items() if key not in of_all} for group in runs.GROUPS]
    groups = [{**given[0], **of_first}, given[1]]
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, steps, torch.float64)
    kept = [Group(**{**{k: v for k, v in of_all.items() if k in vars(Group([]))}, **group}) for group in groups]
    decay, max_grad_norm = of_all.get("decay", "scheduled"), of_all.get("max_grad_norm")
    reference = judge([runs.to_numpy(param) for param in params], kept, max_grad_norm, decay, "schedule" in of_all)
    optimizer = fused(params, groups, backend=backend, **of_all)
    for t, every in enumerate(grads):
        step_grads = [None if (i + t) % 5 == 1 else grad for i, grad in enumerate(every)]
        for own, group, start in zip(kept, optimizer.param_groups, groups, strict=True):
            own.lr = group["lr"] = LR_FACTORS[t % len(LR_FACTORS)] * start["lr"]
        reference.step([None if grad is None else runs.to_numpy(grad) for grad in step_grads])
        run(params, [step_grads], optimizer)
    apart = [error(params, reference.params), error([optimizer.grad_norm], [reference.grad_norm])]
    if decay == "scheduled":
        apart.append(error([optimizer.exp_avg_sq_mean], [reference.exp_avg_sq_mean]))
    for own in kept:
        averages = [AVERAGE] * (own.ema_decay is not None)
        for key in ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * own.amsgrad, *averages):
            found = moments(optimizer, [params[i] for i in own.params], key)
            apart.append(error(found, [getattr(reference, key)[i] for i in own.params]))
    return float(np.max(apart))  # NaN if there is one


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition(backend: str, kind: str) -> None:
    assert apart_from_definition(backend, kind) < 1e-14


WRONG = [
    *(("clipped" if wrong is definition.MeanNotClipped else "plain", wrong) for wrong in definition.WRONG),
    ("lagged", definition.OtherSchedule),
    ("bias of the second group only", definition.AlwaysCorrectsBias),
    ("AdamC", definition.NotCorrected),
    ("corrected", definition.CorrectedTwice),
    *(("independent", wrong) for wrong in (definition.LargestOfAllGroups, definition.IndependentTimesLr)),
    *((kind, definition.AgreesElsewhere) for kind in ("cautious", "cautious independent, maximizing")),
    *(("cautious decoupled", wrong) for wrong in (definition.AgreesWithGradient, definition.AgreesWithAll)),
    ("cautious decoupled", definition.AgreesAfterUpdate),
    *(("averages", wrong) for wrong in (definition.AverageOfOldWeights, definition.DecayOfStepBefore)),
    ("averages", definition.AverageFromFirstStep),
]


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize(("kind", "wrong"), WRONG, ids=str)
def test_wrong_variants_are_told_apart(backend: str, kind: str, wrong: type[AdamS]) -> None:
    assert apart_from_definition(backend, kind, wrong) > 1e-13


PEERS = {"decoupled": (torch.optim.AdamW, 0.1), "l2": (torch.optim.Adam, 0.1), "scheduled": (torch.optim.Adam, 0.0)}


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"max_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("decay", PEERS)
def test_equals_torch(backend: str, decay: Any, options: dict[str, Any]) -> None:
    """At zero decay the scheduled kind is Adam."""
    shapes, steps = runs.shapes_for(backend), runs.steps_for(backend, STEPS)
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, steps, torch.float64)
    peers = [torch.nn.Parameter(param.detach().clone()) for param in params]
    kind, weight_decay = PEERS[decay]
    run(params, grads, FusedAdamS(params, weight_decay=weight_decay, decay=decay, backend=backend, **options))
    limit = options.get("max_grad_norm", torch.inf)
    peer = kind(peers, weight_decay=weight_decay, **{k: v for k, v in options.items() if k != "max_grad_norm"})
    for step_grads in grads:
        for param, grad in zip(peers, step_grads, strict=True):
            param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(peers, limit)
        peer.step()
    for param, twin in zip(params, peers, strict=True):
        torch.testing.assert_close(param, twin, rtol=0, atol=1e-14)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.backends(without=("torch",))
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_as_accurate_as_plain_pytorch(backend: str, dtype: torch.dtype, amsgrad: bool) -> None:
    """Over hundreds of steps their error is at most twice that of plain PyTorch in the same dtype."""
    shapes = runs.shapes_for(backend)
    steps = 10 if runs.is_interpreted(backend) else 200
    start, grads = random_params(shapes, dtype), random_grads(shapes, steps, dtype)
    options = {"amsgrad": amsgrad, "max_grad_norm": 2.0}
    reference = runs.defined(start, grads, **options)
    errors = {}
    for name in ("torch", backend):
        params = [torch.nn.Parameter(param.detach().clone()) for param in start]
        optimizer = fused(params, backend=name, **options)
        run(params, grads, optimizer)
        errors[name] = {
            "param": error(params, reference.params),
            "exp_avg": error(moments(optimizer, params, "exp_avg"), reference.exp_avg),
            "exp_avg_sq": error(moments(optimizer, params, "exp_avg_sq"), reference.exp_avg_sq),
            "mean": abs(float(runs.to_numpy(optimizer.exp_avg_sq_mean) / reference.exp_avg_sq_mean - 1)),
        }
    for name in ("param", "exp_avg", "exp_avg_sq"):
        assert 0 < errors[backend][name] <= 2 * errors["torch"][name], (name, errors)
    # The mean's error is that of the stored second moments; the sum itself may add a few roundings.
    computes_in = torch.promote_types(dtype, torch.float32)
    assert errors[backend]["mean"] <= 2 * errors["torch"]["mean"] + 4 * torch.finfo(computes_in).eps


@pytest.mark.backends(split=True)
def test_groups_may_differ_in_everything(backend: str) -> None:
    groups = [
        {**runs.GROUPS[0], "amsgrad": True, "max_decay": 1e-6},
        {**runs.GROUPS[1], "weight_decay": 0.3, "maximize": True, "max_decay": 1.0},
    ]
    shapes, steps = runs.shapes_for(backend), runs.steps_for(backend, STEPS)
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, steps, torch.float64)
    reference = runs.defined(params, grads, groups)
    optimizer = fused(params, groups, backend=backend)
    with pytest.warns(UserWarning, match="of parameter group 0 .* max_decay=1e-06 allows"):
        run(params, grads, optimizer)
    assert error(params, reference.params) < 1e-14
    assert "max_exp_avg_sq" in optimizer.state[params[0]]
    assert "max_exp_avg_sq" not in optimizer.state[params[5]]


def test_complex_parameters_may_get_other_memory(backend: str) -> None:
    """They are stepped through a view, which must be that of what the parameter has now."""
    param = torch.nn.Parameter(torch.ones(5, dtype=torch.complex64))
    optimizer = FusedAdamS([param], backend=backend)
    for _ in range(3):
        param.data = param.data.clone()
        before = param.detach().clone()
        run([param], [[torch.ones(5, dtype=torch.complex64)]], optimizer)
        assert (param != before).all()
