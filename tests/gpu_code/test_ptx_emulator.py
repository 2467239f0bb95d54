"""The PTX emulator against NumPy, on small kernels compiled offline."""

# ruff: noqa: N803 (constants of Triton kernels are upper case)

from __future__ import annotations

import functools

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.language.extra import libdevice

from tests.gpu_code.ptx_emulator import AccessError, Kernel, Memory, Statistics
from tests.gpu_code.ptx_types import bf16_bits, bf16_values, f16_bits

ARCHITECTURES = [80, 90, 100]


@functools.cache
def compiled(kernel: object, arch: int, warps: int = 4, **types: str) -> CompiledKernel:
    """`types` has the signature; an integer there is a constant."""
    constants = {(i,): v for i, v in enumerate(types.values()) if isinstance(v, int)}
    signature = {name: "constexpr" if isinstance(t, int) else t for name, t in types.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def run(kernel: CompiledKernel, memory: Memory, args: list, programs: int, seed: int | None = None) -> Statistics:
    threads = 32 * kernel.metadata.num_warps
    return Kernel(kernel.asm["ptx"]).run(memory, args, programs, threads, kernel.metadata.shared, seed)


def hand_written(body: str) -> str:
    return f"""
    .version 8.7
    .target sm_90
    .address_size 64
    .visible .entry by_hand(.param .u64 by_hand_param_0)
    {{
        .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
        ld.param.b64 %rd1, [by_hand_param_0];
        {body}
        ret;
    }}
    """


@triton.jit
def add_kernel(out, x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "dtype"), [("fp32", np.float32), ("fp64", np.float64), ("fp16", np.float16)])
def test_an_odd_number_of_sums_equals_numpy(arch: int, kind: str, dtype: type) -> None:
    n = 1000
    x, y = np.random.default_rng(0).standard_normal((2, n)).astype(dtype)
    memory = Memory()
    out, x_at, y_at = memory.put(np.zeros(n, dtype)), memory.put(x, writable=False), memory.put(y, writable=False)
    kernel = compiled(add_kernel, arch, out=f"*{kind}", x=f"*{kind}", y=f"*{kind}", n="i32", BLOCK=256)
    statistics = run(kernel, memory, [out, x_at, y_at, n], programs=4)
    np.testing.assert_array_equal(memory.get(out, n, dtype), x + y)
    assert statistics.loads.bytes == 2 * x.nbytes
    assert statistics.stores.bytes == x.nbytes
    assert statistics.loads.sectors == 2 * -(-x.nbytes // 32)


def test_an_array_that_is_too_short_stops_the_run() -> None:
    memory = Memory()
    at = [memory.put(np.zeros(n, np.float32)) for n in (256, 256, 255)]
    kernel = compiled(add_kernel, 90, out="*fp32", x="*fp32", y="*fp32", n="i32", BLOCK=256)
    with pytest.raises(AccessError, match="outside every array"):
        run(kernel, memory, [*at, 256], programs=1)


def test_a_store_to_what_may_only_be_read_stops_the_run() -> None:
    memory = Memory()
    at = [memory.put(np.zeros(256, np.float32), writable=False) for _ in range(3)]
    kernel = compiled(add_kernel, 90, out="*fp32", x="*fp32", y="*fp32", n="i32", BLOCK=256)
    with pytest.raises(AccessError, match="not writable"):
        run(kernel, memory, [*at, 256], programs=1)


@triton.jit
def copy_wide_kernel(out, x, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(tl.multiple_of(out + i, 16), tl.load(tl.multiple_of(x + i, 16)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_wide_load_of_a_misaligned_array_stops_the_run(arch: int) -> None:
    kernel = compiled(copy_wide_kernel, arch, out="*fp32", x="*fp32", BLOCK=512)
    x = np.arange(512, dtype=np.float32)
    memory = Memory()
    out, aligned, shifted = memory.put(np.zeros_like(x)), memory.put(x), memory.put(x, offset=4)
    statistics = run(kernel, memory, [out, aligned], programs=1)
    np.testing.assert_array_equal(memory.get(out, 512, np.float32), x)
    assert set(statistics.loads.requests_of_width) == {128}
    with pytest.raises(AccessError, match="misaligned: 16 bytes"):
        run(kernel, memory, [out, shifted], programs=1)


@triton.jit
def reduce_kernel(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < n, other=0)
    tl.store(out, tl.sum(values))
    tl.store(out + 1, tl.max(values))
    tl.store(out + 2, tl.sum(values * values))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("warps", [1, 8])
@pytest.mark.parametrize(("kind", "dtype"), [("fp32", np.float32), ("fp64", np.float64), ("i32", np.int32)])
def test_sums_and_maxima_over_all_threads_equal_numpy(arch: int, warps: int, kind: str, dtype: type) -> None:
    """Of small whole numbers, whose sums are exact in any order."""
    x = np.random.default_rng(0).integers(-100, 1000, 1000).astype(dtype)
    memory = Memory()
    out, x_at = memory.put(np.zeros(3, dtype)), memory.put(x, writable=False)
    kernel = compiled(reduce_kernel, arch, warps, out=f"*{kind}", x=f"*{kind}", n="i32", BLOCK=1024)
    run(kernel, memory, [out, x_at, 1000], programs=1)
    np.testing.assert_array_equal(memory.get(out, 3, dtype), [x.sum(), x.max(), (x * x).sum()])


@triton.jit
def two_widths_kernel(narrow, wide, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(tl.multiple_of(narrow + i, 16)).to(tl.float32)
    y = tl.load(tl.multiple_of(wide + i, 16))
    tl.store(tl.multiple_of(narrow + i, 16), (x - y).to(narrow.dtype.element_ty))
    tl.store(tl.multiple_of(wide + i, 16), x + y)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_narrow_and_wide_numbers_side_by_side_equal_numpy(arch: int, kind: str) -> None:
    """sm_100 has instructions on both at once; one layout serves both widths, by way of shared memory or not."""
    x, y = np.random.default_rng(0).standard_normal((2, 4096)).astype(np.float32)
    encode, decode = (bf16_bits, bf16_values) if kind == "bf16" else (f16_bits, lambda b: b.view(np.float16))
    x_bits = encode(x)
    x = decode(x_bits).astype(np.float32)
    memory = Memory()
    narrow, wide = memory.put(x_bits), memory.put(y)
    run(compiled(two_widths_kernel, arch, narrow=f"*{kind}", wide="*fp32", BLOCK=2048), memory, [narrow, wide], 2)
    np.testing.assert_array_equal(memory.get(narrow, 4096, np.uint16), encode(x - y))
    np.testing.assert_array_equal(memory.get(wide, 4096, np.float32), x + y)


@triton.jit
def power_kernel(out, base, exponent, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, libdevice.pow(tl.load(base + i), tl.load(exponent + i)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_function_that_is_called_runs_as_well(arch: int) -> None:
    """pow in fp64 is not inlined. It holds its error below an ulp only if every multiply-add in it rounds once."""
    base, exponent = np.random.default_rng(0).uniform([[0.5], [1]], [[1], [99]], (2, 256))
    memory = Memory()
    out, *sources = (memory.put(x) for x in (np.zeros(256), base, exponent))
    kernel = compiled(power_kernel, arch, out="*fp64", base="*fp64", exponent="*fp64", BLOCK=256)
    assert "call" in kernel.asm["ptx"]
    run(kernel, memory, [out, *sources], programs=1)
    np.testing.assert_array_max_ulp(memory.get(out, 256, np.float64), base**exponent, maxulp=2)


def test_sectors_tell_a_stride_from_neighbours() -> None:
    ptx = hand_written(
        """
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %rd2, %r1, 32;
        add.s64 %rd3, %rd1, %rd2;
        ld.global.b32 %r2, [%rd3];
        ld.global.b32 %r2, [%rd1];
        """
    )
    memory = Memory()
    statistics = Kernel(ptx).run(memory, [memory.put(np.zeros(64 * 32, np.uint8))], programs=1, threads=64)
    assert (statistics.loads.requests, statistics.loads.sectors) == (4, 64 + 2)
    assert (statistics.loads.bytes, statistics.loads.lane_bytes) == (64 * 4 + 2 * 4, 2 * 64 * 4)
