"""The emulator's numbers and instructions: conversions, rounding, and what the manual says, written by hand."""

# ruff: noqa: N803 (constants of Triton kernels are upper case)

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import triton
import triton.language as tl

from tests.gpu_code.ptx_emulator import Kernel, Memory
from tests.gpu_code.ptx_rounding import fma
from tests.gpu_code.ptx_types import bf16_bits, bf16_values
from tests.gpu_code.test_ptx_emulator import (
    ARCHITECTURES,
    compiled,
    hand_written,
    run,
)


@triton.jit
def convert_kernel(out, x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def awkward_floats() -> np.ndarray:
    """Halfway cases of bf16 and fp16 in both directions, subnormals, overflow, infinities, signs."""
    bits = np.random.default_rng(0).integers(0, 2**32, 900, np.uint32)
    halfway = (bits[:400] & 0xFFFF0000) | 0x8000
    small = np.random.default_rng(1).standard_normal(64).astype(np.float32) * np.float32(2.0**-16)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 3.4e38, 1e-40, 2049, 2051], np.float32)
    floats = np.concatenate([bits.view(np.float32), halfway.view(np.float32), small, edges])
    floats = floats[~np.isnan(floats)]
    return np.resize(floats, 2048)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bf16_rounds_to_nearest_even_and_back_exactly(arch: int) -> None:
    torch = pytest.importorskip("torch")
    x = awkward_floats()
    memory = Memory()
    narrow, x_at, wide = memory.put(np.zeros(2048, np.uint16)), memory.put(x), memory.put(np.zeros(2048, np.float32))
    run(compiled(convert_kernel, arch, out="*bf16", x="*fp32", BLOCK=2048), memory, [narrow, x_at], programs=1)
    run(compiled(convert_kernel, arch, out="*fp32", x="*bf16", BLOCK=2048), memory, [wide, narrow], programs=1)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    np.testing.assert_array_equal(memory.get(narrow, 2048, np.uint16), expected.view(torch.uint16).numpy())
    np.testing.assert_array_equal(memory.get(wide, 2048, np.float32), expected.float().numpy())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fp16_and_fp64_convert_as_numpy_does(arch: int) -> None:
    x = awkward_floats()
    memory = Memory()
    x_at = memory.put(x)
    half, back = memory.put(np.zeros(2048, np.float16)), memory.put(np.zeros(2048, np.float32))
    double, down = memory.put(np.zeros(2048, np.float64)), memory.put(np.zeros(2048, np.float32))
    for target, source, out, at in [
        ("fp16", "fp32", half, x_at),
        ("fp32", "fp16", back, half),
        ("fp64", "fp32", double, x_at),
        ("fp32", "fp64", down, double),
    ]:
        kernel = compiled(convert_kernel, arch, out=f"*{target}", x=f"*{source}", BLOCK=2048)
        run(kernel, memory, [out, at], programs=1)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(memory.get(half, 2048, np.float16), expected)
    np.testing.assert_array_equal(memory.get(back, 2048, np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(memory.get(double, 2048, np.float64), x.astype(np.float64))
    np.testing.assert_array_equal(memory.get(down, 2048, np.float32), x)


def test_float64_to_bf16_rounds_once() -> None:
    """Just above halfway: by way of fp32 it would become exactly halfway and go to the even neighbour below."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, -(1 + 2.0**-8 + 2.0**-40)])
    np.testing.assert_array_equal(bf16_values(bf16_bits(x)), np.array([1 + 2.0**-7, 1, -(1 + 2.0**-7)], np.float32))


def exact_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[Fraction]:
    return [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]


def is_nearest_even(result: np.generic, exact: Fraction) -> bool:
    below, above = np.nextafter(result, -np.inf), np.nextafter(result, np.inf)
    distance = abs(Fraction(float(result)) - exact)
    to_below, to_above = (abs(Fraction(float(n)) - exact) for n in (below, above))
    even = int(np.array(result).view(f"u{result.nbytes}")) % 2 == 0
    nearest = distance < min(to_below, to_above)
    return nearest or (distance == min(to_below, to_above) and even)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_fused_multiply_add_rounds_once(dtype: type) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2000)).astype(dtype)
    c = (-a.astype(np.float64) * b * rng.choice([1.0, 1e-3, 1e3, 1 + 1e-12], 2000)).astype(dtype)
    digits = np.finfo(dtype).nmant
    # Products that end exactly halfway, where c far below decides; then sums of the same kind.
    a[:4], b[:4] = 1 + 2.0 ** -((digits + 1) // 2), 1 + 2.0 ** -(digits + 1 - (digits + 1) // 2)
    a[2:4], c[:4] = -a[2:4], [2.0**-120, -(2.0**-120)] * 2
    a[4:8], b[4:8], c[4:8] = 1, [1, 1, -1, -1], np.array([1, -1, 1, -1]) * 2.0 ** -(digits + 1) * (1 + 2.0**-20)
    tiny = np.finfo(dtype).tiny
    a[8:40] = tiny * rng.standard_normal(32)
    c[8:40] = tiny * rng.standard_normal(32)
    results = fma(a, b, c).astype(dtype)
    for result, exact in zip(results, exact_fma(a, b, c), strict=True):
        assert is_nearest_even(result, exact)


def test_a_fused_multiply_add_that_rounds_twice_would_be_seen() -> None:
    """1 + 2^-24 + 2^-80 is above halfway in fp32, and exactly halfway after a rounding to float64."""
    a, b, c = (np.array([x], np.float32) for x in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80))
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert not is_nearest_even(twice[0], exact_fma(a, b, c)[0])
    assert is_nearest_even(fma(a, b, c).astype(np.float32)[0], exact_fma(a, b, c)[0])


def test_infinities_and_nans_pass_through_a_fused_multiply_add() -> None:
    inf, nan = np.inf, np.nan
    for dtype in (np.float32, np.float64):
        a, b, c = np.array([[inf, 1, 0, 1e30], [2, 1, inf, 1e30], [1, -inf, 1, 1]], dtype)
        with np.errstate(all="ignore"):
            result = fma(a, b, c).astype(dtype)
        np.testing.assert_array_equal(result[:3], np.array([inf, -inf, nan], dtype))
        assert result[3] == (inf if dtype == np.float32 else 1e30 * 1e30)


def one_result(body: str, dtype: type = np.uint32) -> np.generic:
    """What the body leaves in %r1 of the last lane, or in %rd2 for eight bytes."""
    memory = Memory()
    at = memory.put(np.zeros(1, dtype))
    register = "st.global.b64 [%rd1], %rd2;" if np.dtype(dtype).itemsize == 8 else "st.global.b32 [%rd1], %r1;"
    Kernel(hand_written(body + register)).run(memory, [at], programs=1, threads=32)
    return memory.get(at, 1, dtype)[0]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.b32 %r2, -7; mov.b32 %r3, 2; div.s32 %r1, %r2, %r3;", 2**32 - 3),
        ("mov.b32 %r2, -7; mov.b32 %r3, 2; rem.s32 %r1, %r2, %r3;", 2**32 - 1),
        ("mov.b32 %r2, 0xFFFFFFFF; mul.hi.u32 %r1, %r2, %r2;", 0xFFFFFFFE),
        ("mov.b32 %r2, 0xFFFFFFFF; mul.lo.s32 %r1, %r2, 3;", 2**32 - 3),
        ("mov.b32 %r2, -16; shr.s32 %r1, %r2, 2;", 2**32 - 4),
        ("mov.b32 %r2, -16; shr.u32 %r1, %r2, 40;", 0),
        ("mov.b32 %r2, 0xABCD1234; bfe.u32 %r1, %r2, 8, 8;", 0x12),
        ("mov.b32 %r2, 0xABCDF234; bfe.s32 %r1, %r2, 8, 8;", 0xFFFFFFF2),
        ("mov.b32 %r2, 0x11223344; mov.b32 %r3, 0x55667788; prmt.b32 %r1, %r2, %r3, 0x5410;", 0x77883344),
        ("mov.b32 %r2, 0x11223344; mov.b32 %r3, 0x55667788; shf.l.wrap.b32 %r1, %r2, %r3, 8;", 0x66778811),
        ("mov.b32 %r2, 0xF0; mov.b32 %r3, 0xCC; mov.b32 %r4, 0xAA; lop3.b32 %r1, %r2, %r3, %r4, 0xE8;", 0xE8),
        ("mov.b32 %r2, 0xF0F0; popc.b32 %r1, %r2;", 8),
        ("mov.b16 %rs1, -2; cvt.s32.s16 %r1, %rs1;", 2**32 - 2),
        ("mov.b16 %rs1, -2; cvt.u32.u16 %r1, %rs1;", 65534),
        ("mov.b16 %rs1, 1; mov.b16 %rs2, 2; mov.b32 %r1, {%rs1, %rs2};", 0x00020001),
        ("mov.b32 %r2, 0x7FC00000; cvt.rzi.s32.f32 %r1, %r2;", 0),
        ("mov.b32 %r2, 0xCF800000; cvt.rzi.s32.f32 %r1, %r2;", 0x80000000),
        ("mov.b32 %r2, 0x40200000; cvt.rni.u32.f32 %r1, %r2;", 2),
        ("mov.b32 %r2, 0x00400000; mul.ftz.f32 %r1, %r2, 0f4F000000;", 0),
        ("mov.b32 %r2, 0x00400000; add.f32 %r1, %r2, %r2;", 0x00800000),
        ("mov.b32 %r2, 0x7FC00000; max.f32 %r1, %r2, 0f3F800000;", 0x3F800000),
        ("mov.b32 %r2, 0x7FC00000; max.NaN.f32 %r1, %r2, 0f3F800000;", 0x7FC00000),
        ("mov.b32 %r2, 0x7FC00000; setp.neu.f32 %p1, %r2, %r2; selp.b32 %r1, 1, 0, %p1;", 1),
        ("mov.b32 %r2, 0x7FC00000; setp.ne.f32 %p1, %r2, %r2; selp.b32 %r1, 1, 0, %p1;", 0),
        ("setp.lt.and.s32 %p1|%p2, -1, 1, %p3; selp.b32 %r1, 1, 0, %p2;", 0),
        ("mov.b32 %r2, 0x3F803F80; mov.b32 %r3, 0x40004040; fma.rn.bf16x2 %r1, %r2, %r3, %r2;", 0x40404080),
        ("mov.b32 %r2, 0x3C003C00; add.f16x2 %r1, %r2, %r2;", 0x40004000),
        ("mov.b16 %rs1, 0x4040; mov.b32 %r2, 0x3F800000; sub.rn.f32.bf16 %r1, %rs1, %r2;", 0x40000000),
        ("mov.b16 %rs1, 0x4040; mov.b32 %r2, 0x3F800000; fma.rn.f32.bf16 %r1, %rs1, %rs1, %r2;", 0x41200000),
        ("mov.b32 %r2, 0f3F800000; max.f32 %r1, %r2, 0f40000000, 0f40400000;", 0x40400000),
        ("mov.b32 %r2, 0f3F800000; add.rz.f32 %r1, %r2, 0fB0800000;", 0x3F7FFFFF),
        ("mov.b32 %r2, 0f3F800000; add.rz.f32 %r1, %r2, 0f33C00000;", 0x3F800000),
        ("mov.b32 %r2, 0f3F800001; fma.rz.f32 %r1, %r2, %r2, 0f80000000;", 0x3F800002),
        ("mov.u32 %r2, %laneid; redux.sync.max.u32 %r1, %r2, -1;", 31),
        ("mov.u32 %r2, %laneid; shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", 30),
        ("mov.u32 %r2, %laneid; shfl.sync.down.b32 %r1, %r2, 1, 31, -1;", 31),
        ("mov.u32 %r2, %laneid; shfl.sync.idx.b32 %r1, %r2, 5, 0x181F, -1;", 29),
        ("mov.u32 %r2, %laneid; shfl.sync.up.b32 %r1, %r2, 31, 0, -1;", 0),
    ],
)
def test_an_instruction_does_what_its_manual_says(body: str, expected: int) -> None:
    assert one_result(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.b64 %rd3, -1; mul.hi.u64 %rd2, %rd3, %rd3;", 2**64 - 2),
        ("mov.b32 %r2, -5; mad.wide.s32 %rd2, %r2, 3, 1;", 2**64 - 14),
        ("mov.b64 %rd3, 0d3FF0000000000001; fma.rn.f64 %rd2, %rd3, %rd3, 0dBFF0000000000002;", 0x3970000000000000),
        ("mov.b64 %rd3, 0x0000000100000002; mov.b64 {%r1, %r2}, %rd3; cvt.u64.u32 %rd2, %r1;", 2),
        ("mov.b32 %r2, 0x3F800000; mov.b64 %rd3, {%r2, %r2}; add.f32x2 %rd2, %rd3, %rd3;", 0x4000000040000000),
    ],
)
def test_an_instruction_on_64_bits_does_what_its_manual_says(body: str, expected: int) -> None:
    assert one_result(body, np.uint64) == expected


@pytest.mark.parametrize(
    "body", ["add.rp.f32 %r1, %r1, %r1;", "wgmma.fence.sync;", "bar.sync 1;", "add.s32 %r1, %r1, %r2, %r3;"]
)
def test_what_is_not_known_is_refused_before_the_run(body: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(body.rstrip(";"))):
        Kernel(hand_written(body))


@pytest.mark.parametrize("body", ["add.f32 %rs1, %r1, %r1;", "add.f32 %r1, %rs1, %r1;", "add.f16 %r1, %rs1, %rs1;"])
def test_a_register_of_the_wrong_width_is_refused_before_the_run(body: str) -> None:
    with pytest.raises(ValueError, match="bits and cannot"):
        Kernel(hand_written(body))


def test_a_shuffle_from_a_lane_that_left_is_refused() -> None:
    with pytest.raises(RuntimeError, match="does not take part"):
        one_result(
            "mov.u32 %r2, %laneid; setp.eq.b32 %p1, %r2, 3; @%p1 bra $out;shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1; $out:"
        )
