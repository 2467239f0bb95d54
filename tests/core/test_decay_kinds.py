"""The paper's three optimizers share the kernels: scheduled, decoupled and L2 decay with everything else equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runs import SHAPES, fused, random_grads, random_params, run, steps_for

PEERS = {"decoupled": torch.optim.AdamW, "l2": torch.optim.Adam}
ALL = [{"params": range(len(SHAPES))}]


def apart(params: list[torch.nn.Parameter], peers: list[torch.nn.Parameter]) -> float:
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in zip(params, peers, strict=True) if p.numel())


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("decay", PEERS)
def test_equals_torch(backend: str, decay: str, options: dict[str, Any]) -> None:
    steps = steps_for(backend, 40)
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, steps, torch.float64)
    peers = [torch.nn.Parameter(param.detach().clone()) for param in params]
    start = [param.detach().clone() for param in params]
    run(params, grads, fused(params, ALL, weight_decay=0.1, decay=decay, backend=backend, **options))
    run(peers, grads, PEERS[decay](peers, weight_decay=0.1, **options))
    assert apart(params, peers) < 1e-14 < 1e-4 < apart(params, start)


@pytest.mark.parametrize("decay", PEERS)
def test_equals_torch_after_clipping(backend: str, decay: str) -> None:
    steps = steps_for(backend, 20)
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, steps, torch.float64)
    peers = [torch.nn.Parameter(param.detach().clone()) for param in params]
    run(params, grads, fused(params, ALL, weight_decay=0.1, decay=decay, max_grad_norm=0.5, backend=backend))
    peer = PEERS[decay](peers, weight_decay=0.1)
    for step_grads in grads:
        for param, grad in zip(peers, step_grads, strict=True):
            param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(peers, 0.5)
        peer.step()
    assert apart(params, peers) < 1e-14


def test_kinds_are_told_apart(backend: str) -> None:
    steps = steps_for(backend, 20)
    results = {}
    for decay in ("scheduled", "decoupled", "l2"):
        torch.manual_seed(0)
        params, grads = random_params([(50,)], torch.float64), random_grads([(50,)], steps, torch.float64)
        run(params, grads, fused(params, [{"params": [0]}], weight_decay=0.01, decay=decay, backend=backend))
        results[decay] = params
    for one, other in (("scheduled", "decoupled"), ("scheduled", "l2"), ("decoupled", "l2")):
        assert apart(results[one], results[other]) > 1e-6


def test_without_bias_correction(backend: str) -> None:
    """As apex has it: one step by hand."""
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = fused([param], [{"params": [0]}], weight_decay=0.0, bias_correction=False, lr=0.1, backend=backend)
    run([param], [[torch.tensor([0.5, 4.0], dtype=torch.float64)]], optimizer)
    grad = torch.tensor([0.5, 4.0], dtype=torch.float64)
    wanted = torch.tensor([1.0, -2.0], dtype=torch.float64) - 0.1 * (0.1 * grad) / ((0.001 * grad**2).sqrt() + 1e-8)
    torch.testing.assert_close(param.detach(), wanted, rtol=0, atol=1e-14)
    assert optimizer.exp_avg_sq_mean.item() == pytest.approx(float((0.001 * grad**2).mean()), rel=1e-12)


def test_apex_keywords_are_accepted() -> None:
    params = random_params([(5,)])
    optimizer = fused(
        params,
        [{"params": [0]}],
        bias_correction=True,
        adam_w_mode=False,
        set_grad_none=False,
        capturable=True,
        master_weights=False,
    )
    assert optimizer.options.decay == "l2"
    assert "decay: l2" in repr(optimizer)
    params[0].grad = torch.ones(5)
    optimizer.zero_grad()
    assert torch.equal(params[0].grad, torch.zeros(5))
    optimizer.zero_grad(set_to_none=True)
    assert params[0].grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "cosine"}, "decay='cosine', wanted one of"),
        ({"decay": "decoupled", "adam_w_mode": False}, "Use one of the two"),
        ({"decay": "l2", "schedule": "lagged"}, "need no schedule"),
        ({"adam_w_mode": False, "schedule": "lagged"}, "need no schedule"),
        ({"schedule": "lagged", "skip_nonfinite": True}, "costs the same"),
        ({"bias_correction": 1}, "bias_correction=1, wanted True or False"),
    ],
    ids=str,
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused(random_params([(5,)]), [{"params": [0]}], **options)


def test_match_adamw_is_for_the_schedule() -> None:
    with pytest.raises(ValueError, match="Set weight_decay instead"):
        fused(random_params([(5,)]), [{"params": [0]}], decay="decoupled").match_adamw(weight_decay=0.1)


def test_effective_weight_decay_of_decoupled_is_its_own(backend: str) -> None:
    params = random_params([(5,)])
    optimizer = fused(params, [{"params": [0]}], decay="decoupled", weight_decay=0.3, backend=backend)
    run(params, random_grads([(5,)], 2), optimizer)
    assert optimizer.effective_weight_decay() == pytest.approx([0.3])
