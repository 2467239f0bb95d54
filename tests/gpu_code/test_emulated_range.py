"""Gradients whose squares float32 cannot hold, and zeros: the norm that compiled steps find, and what that takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused.backends.triton.kernels.tables import RESULT

from .emulated_step import EmulatedStep
from .offline_compiler import CONFIGURATIONS
from .ptx_emulator import Statistics
from .test_emulated_kernels import EXACT, LAGGED

# Whole blocks of pass 1, and a rest. Rows of 8 bits.
SHAPE = (9, 1032)

# What gradients are multiplied by: all of them, or one half and the other. The least float32 number is 1.4e-45.
SIZES = {
    "zero": (0.0, 0.0),
    "least": (1.4e-45, 0.0),
    "subnormal": (1e-41, 1e-44),
    "tiny": (1e-21, 1e-21),
    "tiny and subnormal": (1e-20, 1e-43),
    "at the limit": (1e-14, 1e-38),
    "tiny and ordinary": (1e-21, 1.0),
    "huge": (1e25, 1e25),
    "largest": (3e38, 3e38),
    "huge and tiny": (1e20, 1e-30),
    "huge and ordinary": (1e21, 1.0),
    "infinite": (math.inf, 1.0),
    "infinite and tiny": (math.inf, 1e-30),
    "NaN": (math.nan, 0.0),
    "NaN and huge": (math.nan, 1e30),
}
CASES = [
    *((kernel, kind, 0) for kernel in (EXACT, LAGGED) for kind in ("fp32", "bf16", "fp32 in 8 bits")),
    (EXACT, "fp32", 1),
    (LAGGED, "bf16", 1),
    (LAGGED, "fp32 with bf16 gradients", 0),
    (EXACT, "fp32 amsgrad", 0),
]


def launched(kernel: str, configuration: str, grad: Tensor, offset: int = 0) -> tuple[EmulatedStep, Statistics]:
    param = torch.ones(grad.shape, dtype=CONFIGURATIONS[configuration].dtypes.param)
    model = EmulatedStep(configuration, [param], [{"params": [0]}], programs=1, offset=offset)
    model.set_grads([grad])
    return model, model.launch(kernel)


@pytest.mark.thinned
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kernel", "configuration", "offset"), CASES)
def test_the_norm_is_right_in_all_of_the_range(kernel: str, configuration: str, offset: int, size: str) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor(SIZES[size], dtype=torch.float64)[torch.randint(2, SHAPE, generator=generator)]
    grad = (factors * (0.5 + 0.5 * torch.rand(SHAPE, generator=generator))).to(
        CONFIGURATIONS[configuration].dtypes.grad
    )
    model, _ = launched(kernel, configuration, grad, offset)
    right = float(grad.double().square().sum().sqrt())
    np.testing.assert_allclose(model.get("results")[RESULT.grad_norm], right, rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-21, 1e25])
@pytest.mark.parametrize("configuration", ["fp32", "bf16", "fp32 in 8 bits"])
@pytest.mark.parametrize("kernel", [EXACT, LAGGED])
def test_summing_again_takes_few_instructions(kernel: str, configuration: str, size: float) -> None:
    """As many as a plain pass 1 and one more for each element, in wide loads: 3.8 for float32 gradients and 5.1 for
    bfloat16. One by one, in float64, it was 10.1 and 11.2."""
    dtype = CONFIGURATIONS[configuration].dtypes.grad
    grad = torch.ones(16, 1024)
    _, plain = launched(kernel, configuration, grad.to(dtype))
    _, again = launched(kernel, configuration, (size * grad).to(dtype))
    elements = grad.numel()
    instructions = 32 * (again.warp_instructions - plain.warp_instructions) / elements
    print(f"{kernel}, {configuration}: {instructions:.1f} instructions more for each element")
    assert instructions < 6.5
    wide = again.loads.requests_of_width[128] - plain.loads.requests_of_width[128]
    assert 16 * 32 * wide == dtype.itemsize * elements
    assert again.loads.bytes - plain.loads.bytes < 1.05 * dtype.itemsize * elements
