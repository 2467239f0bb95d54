"""The paper's three optimizers share the kernels: scheduled, decoupled and L2 decay with everything else equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
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


def test_the_decay_is_that_of_the_peer_where_none_is_given() -> None:
    for decay, peer_class in PEERS.items():
        [given], [wanted] = (
            [group["weight_decay"] for group in optimizer.param_groups]
            for optimizer in (FusedAdamS(random_params(SHAPES), decay=decay), peer_class(random_params(SHAPES)))
        )
        assert given == wanted, decay
    assert FusedAdamS(random_params(SHAPES)).param_groups[0]["weight_decay"] == 5e-4, "the paper's"
    assert FusedAdamS(random_params(SHAPES), decay="independent").param_groups[0]["weight_decay"] == 0.01 * 1e-3


def test_without_bias_correction(backend: str) -> None:
    """As apex has it: one step by hand."""
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = fused([param], [{"params": [0]}], weight_decay=0.0, bias_correction=False, lr=0.1, backend=backend)
    run([param], [[torch.tensor([0.5, 4.0], dtype=torch.float64)]], optimizer)
    grad = torch.tensor([0.5, 4.0], dtype=torch.float64)
    wanted = torch.tensor([1.0, -2.0], dtype=torch.float64) - 0.1 * (0.1 * grad) / ((0.001 * grad**2).sqrt() + 1e-8)
    torch.testing.assert_close(param.detach(), wanted, rtol=0, atol=1e-14)
    assert optimizer.exp_avg_sq_mean.item() == pytest.approx(float((0.001 * grad**2).mean()), rel=1e-12)


def test_bias_correction_by_group(backend: str) -> None:
    """apex keeps it in the group. The mean is over both groups, each corrected or not; decay makes it visible."""
    dtype = torch.float64
    params, grads = random_params([(40,), (50,)], dtype), random_grads([(40,), (50,)], steps_for(backend, 10), dtype)
    wanted = [param.detach().clone() for param in params]
    moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in wanted]
    groups = [{"params": [0]}, {"params": [1], "bias_correction": False}]
    optimizer = fused(params, groups, weight_decay=0.01, lr=0.01, betas=(0.9, 0.99), backend=backend)
    run(params, grads, optimizer)
    for t, step_grads in enumerate(grads, 1):
        hats = []
        for i, ((m, v), grad) in enumerate(zip(moments, step_grads, strict=True)):
            m.lerp_(grad, 0.1)
            v.lerp_(grad.square(), 0.01)
            hats.append((m, v) if i == 1 else (m / (1 - 0.9**t), v / (1 - 0.99**t)))
        mean = sum(float(v.sum()) for _, v in hats) / 90
        for param, (m, v) in zip(wanted, hats, strict=True):
            param.mul_(1 - 0.01 * 0.01 / (mean**0.5 + 1e-8)).sub_(0.01 * m / (v.sqrt() + 1e-8))
    assert apart(params, [torch.nn.Parameter(param) for param in wanted]) < 1e-14
    other = FusedAdamS([{"params": [params[0]]}, {"params": [params[1]]}])
    other.load_state_dict(optimizer.state_dict())
    assert [group["bias_correction"] for group in other.param_groups] == [True, False]
    with pytest.raises(ValueError, match=r"different bias_correction, \[False, True\]"):
        optimizer.step(grad_sumsq=1.0)


def test_torch_keywords_are_accepted_without_effect() -> None:
    params, grads = random_params([(5,)]), random_grads([(5,)], 2)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    run(params, grads, FusedAdamS(params, fused=True, foreach=None, capturable=True, differentiable=False))
    run(twins, grads, FusedAdamS(twins))
    assert torch.equal(params[0], twins[0])


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
