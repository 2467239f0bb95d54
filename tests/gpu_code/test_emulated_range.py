"""Gradients whose squares float32 cannot hold, and zeros: the norm that compiled steps find, and what that takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS

from .emulated_launches import emulated_launches
from .ptx_emulator import Statistics

# Whole blocks of pass 1, and a rest. Rows of 8 bits.
SHAPE = (9, 1032)

# What gradients are multiplied by: one half of them and the other. The least float32 number is 1.4e-45.
SIZES = {
    "zero": (0.0, 0.0),
    "least": (1.4e-45, 0.0),
    "subnormal": (1e-41, 1e-44),
    "tiny and subnormal": (1e-20, 1e-43),
    "at the limit": (1e-14, 1e-38),
    "tiny and ordinary": (1e-21, 1.0),
    "largest": (3e38, 3e38),
    "huge and tiny": (1e20, 1e-30),
    "huge and ordinary": (1e21, 1.0),
    "infinite and tiny": (math.inf, 1e-30),
    "NaN and huge": (math.nan, 1e30),
}
KINDS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "fp32": ({}, torch.float32),
    "bf16": ({}, torch.bfloat16),
    "fp32 in 8 bits": ({"state_dtype": "8bit"}, torch.float32),
    "fp32 amsgrad": ({"amsgrad": True}, torch.float32),
}
CASES = [
    *((schedule, kind, 0) for schedule in ("exact", "lagged") for kind in KINDS if "amsgrad" not in kind),
    ("exact", "fp32", 1),
    ("lagged", "bf16", 1),
    ("exact", "fp32 amsgrad", 0),
]


def launched(schedule: Any, kind: str, grad: Tensor, offset: int = 0) -> tuple[FusedAdamS, Statistics]:
    """Takes a step with ordinary gradients and one with these, and returns what the last one took."""
    options, dtype = KINDS[kind]
    param = torch.nn.Parameter(torch.ones(grad.numel() + offset, dtype=dtype)[offset:].view(grad.shape))
    with emulated_launches(programs=1) as emulator:
        optimizer = FusedAdamS([param], backend="triton", schedule=schedule, **options)
        for given in (torch.ones_like(grad), grad):
            param.grad = torch.empty(grad.numel() + offset, dtype=dtype)[offset:].view(grad.shape).copy_(given)
            optimizer.step()
    name, statistics = emulator.statistics[-1]
    assert name == f"{schedule}_step_kernel"
    return optimizer, statistics


@pytest.mark.thinned
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("schedule", "kind", "offset"), CASES)
def test_the_norm_is_right_in_all_of_the_range(schedule: str, kind: str, offset: int, size: str) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor(SIZES[size], dtype=torch.float64)[torch.randint(2, SHAPE, generator=generator)]
    grad = (factors * (0.5 + 0.5 * torch.rand(SHAPE, generator=generator))).to(KINDS[kind][1])
    optimizer, _ = launched(schedule, kind, grad, offset)
    right = float(grad.double().square().sum().sqrt())
    np.testing.assert_allclose(float(optimizer.grad_norm), right, rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-21, 1e25])
@pytest.mark.parametrize(
    ("schedule", "kind"), [("exact", "fp32"), ("exact", "bf16"), ("lagged", "fp32"), ("lagged", "fp32 in 8 bits")]
)
def test_summing_again_takes_few_instructions(schedule: str, kind: str, size: float) -> None:
    """As many as a plain pass 1 and one more for each element, in wide loads: 3.8 for float32 gradients and 5.1 for
    bfloat16. One by one, in float64, it was 10.1 and 11.2."""
    grad = torch.ones(16, 1024, dtype=KINDS[kind][1])
    plain, again = (launched(schedule, kind, factor * grad)[1] for factor in (1.0, size))
    elements, itemsize = grad.numel(), grad.element_size()
    instructions = 32 * (again.warp_instructions - plain.warp_instructions) / elements
    print(f"{schedule}, {kind}: {instructions:.1f} instructions more for each element")
    assert instructions < 6.5
    wide = again.loads.requests_of_width[128] - plain.loads.requests_of_width[128]
    assert 16 * 32 * wide == itemsize * elements
    assert again.loads.bytes - plain.loads.bytes < 1.05 * itemsize * elements
