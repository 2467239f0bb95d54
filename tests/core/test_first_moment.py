"""The first moment where beta1 is small: a gradient that is much smaller than the one before it must not be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.state import eight_bit
from tests.runs import run

# A whole block, and what is left over from vectors and blocks.
SHAPES = [(1, 1024), (3, 67), (5,)]

DECAYS = [{}, {"decay": "l2"}, {"amsgrad": True}, {"amsgrad": True, "decay": "l2"}]


def first_moments(
    backend: str, betas: list[float], dtype: torch.dtype = torch.float32, **options: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of about 100, then of about 3e-7: exp_avg as it is stored and as it should be, for each tensor. Each
    beta1 is that of a group of its own. Without a learning rate the weights stay zero, and L2 adds nothing."""
    params = [[torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES] for _ in betas]
    grads = [
        [(size * (1 + torch.rand(shape, dtype=torch.float64))).to(dtype) for _ in betas for shape in SHAPES]
        for size in (100.0, 3e-7)
    ]
    groups = [{"params": each, "betas": (beta1, 0.99)} for beta1, each in zip(betas, params, strict=True)]
    optimizer = FusedAdamS(groups, lr=0.0, weight_decay=0.1, backend=backend, **options)
    flat = [param for each in params for param in each]
    run(flat, grads, optimizer)
    stored = []
    for param in flat:
        state = optimizer.state[param]
        if "exp_avg" in state:
            stored.append(state["exp_avg"])
        else:
            stored.append(eight_bit.decoded("exp_avg", state["exp_avg_codes"], state["exp_avg_scales"]))
    weights = [beta1 for beta1 in betas for _ in SHAPES]
    wanted = [
        beta1 * (1 - beta1) * first.double() + (1 - beta1) * second.double()
        for beta1, first, second in zip(weights, *grads, strict=True)
    ]
    return list(zip(stored, wanted, strict=True))


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("options", DECAYS, ids=str)
def test_a_small_gradient_after_a_large_one(backend: str, options: dict[str, Any]) -> None:
    for exp_avg, wanted in first_moments(backend, [0.0, 0.4, 0.5, 0.6, 0.9], **options):
        torch.testing.assert_close(exp_avg.double(), wanted, rtol=4e-7, atol=0)


@pytest.mark.backends(without=("torch",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_beta1_that_is_almost_zero(backend: str, dtype: torch.dtype) -> None:
    """torch's own operations take it to be 1 - (1 - beta1), which is 0 if beta1 is 1e-9."""
    for exp_avg, wanted in first_moments(backend, [0.0, 1e-9, 1e-3, 0.05], dtype):
        torch.testing.assert_close(exp_avg.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("options", DECAYS, ids=str)
def test_stored_in_bfloat16(backend: str, options: dict[str, Any]) -> None:
    for exp_avg, wanted in first_moments(backend, [0.0], state_dtype=torch.bfloat16, **options):
        assert exp_avg.dtype == torch.bfloat16
        torch.testing.assert_close(exp_avg.double(), wanted, rtol=2**-8, atol=0)


@pytest.mark.backends(split=True)
@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize("options", DECAYS, ids=str)
def test_stored_in_8_bits(backend: str, options: dict[str, Any]) -> None:
    """To one code, of which the largest number of a block has 127."""
    for exp_avg, wanted in first_moments(backend, [0.0], state_dtype="8bit", **options):
        assert float((exp_avg - wanted).abs().max()) <= float(wanted.max()) / 127
