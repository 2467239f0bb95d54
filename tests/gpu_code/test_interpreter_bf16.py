"""Triton's interpreter with the patch for bf16: conversions as torch does them, bit for bit."""

# ruff: noqa: N803 (constants of Triton kernels are upper case)

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterError

from tests.gpu_code import interpreter_bf16

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def _interpreter_as_it_was() -> Iterator[None]:
    names = ("cast_impl", "create_fp_to_fp", "binary_op")
    before = {name: getattr(InterpreterBuilder, name) for name in names}
    yield
    for name, method in before.items():
        setattr(InterpreterBuilder, name, method)


def awkward_floats() -> np.ndarray:
    """Halfway cases of bf16 and fp16 in both directions, subnormals, overflow, infinities, signs."""
    bits = np.random.default_rng(0).integers(0, 2**32, 900, np.uint32)
    halfway = (bits[:400] & 0xFFFF0000) | 0x8000
    small = np.random.default_rng(1).standard_normal(64).astype(np.float32) * np.float32(2.0**-16)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 3.4e38, 1e-40, 2049, 2051], np.float32)
    floats = np.concatenate([bits.view(np.float32), halfway.view(np.float32), small, edges])
    return np.resize(floats[~np.isnan(floats)], 2048)


def convert(out, x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def add(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty_like(x, dtype=dtype)
    InterpretedFunction(convert)[(1,)](out, x, BLOCK=x.numel())
    return out


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_a_conversion_in_the_interpreter_equals_that_of_torch(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.from_numpy(awkward_floats()).to(source)
    interpreter_bf16.install()
    assert torch.equal(converted(x, target), x.to(target))


def test_the_patch_is_needed() -> None:
    """When this fails, Triton has mended its interpreter and the patch can go."""
    x = torch.from_numpy(awkward_floats())
    assert (converted(x, torch.bfloat16) != x.bfloat16()).sum() > 0.4 * x.numel()


def test_bf16_arithmetic_is_refused() -> None:
    interpreter_bf16.install()
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="convert to fp32 first"):
        InterpretedFunction(add)[(1,)](torch.empty_like(x), x, x, BLOCK=16)
