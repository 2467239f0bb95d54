"""The authors' loop, written from the paper, is AdamS but for eps in the schedule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.step_times.authors_loop import AuthorsLoop
from swd_fused import FusedAdamS

STEPS = 10


def trained(optimizer_class: type, weight_decay: float, **options: object) -> Tensor:
    """Parameters around 1 after steps with gradients of rms 1e-3, in two groups of which one does not decay."""
    generator = torch.Generator().manual_seed(0)
    new = partial(torch.randn, generator=generator, dtype=torch.float64)
    params = [torch.nn.Parameter(1 + 0.1 * new(shape)) for shape in ((40, 30), (300,), (11,))]
    groups = [{"params": params[:2], "weight_decay": weight_decay}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = optimizer_class(groups, lr=1e-3, **options)
    for _ in range(STEPS):
        for param in params:
            param.grad = 1e-3 * new(param.shape)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in params])


def fused(weight_decay: float, backend: str, eps: float) -> Tensor:
    return trained(FusedAdamS, weight_decay, backend=backend, eps=eps)


WEIGHT_DECAY = 1e-2  # removes 1e-3 * 1e-2 / 1e-3 = 1% of a weight in each step


@pytest.mark.filterwarnings("ignore:The weight decay of parameter group")  # it acts like 10 here
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_authors_loop_equals_fused_adams_without_eps(kernels: str) -> None:
    """With eps = 0 the two definitions are one, so only rounding is left."""
    loop = trained(AuthorsLoop, WEIGHT_DECAY, eps=0.0)
    torch.testing.assert_close(loop, fused(WEIGHT_DECAY, kernels, eps=0.0), rtol=1e-12, atol=1e-13)
    slightly_wrong = fused(WEIGHT_DECAY * (1 + 1e-6), kernels, eps=0.0)
    assert (loop - slightly_wrong).abs().max() > 1e-8


@pytest.mark.filterwarnings("ignore:The weight decay of parameter group")
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_authors_loop_differs_from_fused_adams_by_eps_in_the_schedule(kernels: str) -> None:
    """1e-8 beside an rms of 1e-3 weakens a decay of 1% by 1e-5 of itself: 1e-7 of a weight in each step."""
    loop = trained(AuthorsLoop, WEIGHT_DECAY)
    expected = STEPS * 1e-7
    difference = (fused(WEIGHT_DECAY, kernels, eps=1e-8) - loop)[:1500]
    assert 0.5 * expected < difference.mean() < 1.5 * expected
    assert difference.abs().max() < 2 * expected
    wrong = (fused(WEIGHT_DECAY * (1 - 1e-4), kernels, eps=1e-8) - loop)[:1500]
    assert wrong.mean() > 5 * expected
