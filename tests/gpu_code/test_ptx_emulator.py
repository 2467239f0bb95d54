"""The PTX emulator against NumPy, on small kernels compiled offline and on instructions written by hand."""

# ruff: noqa: N803 (constants of Triton kernels are upper case)

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.language.extra import libdevice

from tests.gpu_code.ptx_emulator import AccessError, Kernel, Memory, RaceError, Statistics
from tests.gpu_code.ptx_rounding import fma
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


@triton.jit
def grid_mean_kernel(out, x, partials, arrivals, n, BLOCK: tl.constexpr):
    """Each program sums its part; after a barrier among all of them, each divides its part by the mean."""
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(partials + pid, tl.sum(values))
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="release", scope="gpu")
    target = (before // tl.num_programs(0) + 1) * tl.num_programs(0)
    while tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()
    total = 0.0
    for program in range(tl.num_programs(0)):
        total += tl.load(partials + program)
    tl.store(out + i, values / (total / n), mask=i < n)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_barrier_among_programs_opens_in_any_order_and_again_in_the_next_launch(arch: int, seed: int | None) -> None:
    n, programs = 1200, 5
    x = np.random.default_rng(0).uniform(1, 2, n).astype(np.float32)
    memory = Memory()
    out, x_at = memory.put(np.zeros(n, np.float32)), memory.put(x, writable=False)
    partials, arrivals = memory.put(np.full(programs, np.nan, np.float32)), memory.put(np.zeros(1, np.int32))
    kernel = compiled(
        grid_mean_kernel, arch, out="*fp32", x="*fp32", partials="*fp32", arrivals="*i32", n="i32", BLOCK=256
    )
    results = []
    for launch in (1, 2):
        statistics = run(kernel, memory, [out, x_at, partials, arrivals, n], programs, seed)
        assert memory.get(arrivals, 1, np.int32) == launch * programs
        assert sum(c for op, c in statistics.synchronising.items() if "release.add" in op) == programs
        results.append(memory.get(out, n, np.float32))
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], x / x.astype(np.float64).mean(), rtol=1e-6)


@triton.jit
def lane_sums_kernel(out, x, partials, arrivals, BLOCK: tl.constexpr):
    """As above, but every thread leaves a partial sum, so that the program's own barriers matter as well."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(partials + pid * BLOCK + i, tl.load(x + pid * BLOCK + i))
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="release", scope="gpu")
    target = (before // tl.num_programs(0) + 1) * tl.num_programs(0)
    while tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") < target:
        pass
    sums = tl.zeros((BLOCK,), tl.float32)
    for program in range(tl.num_programs(0)):
        sums += tl.load(partials + program * BLOCK + i)
    tl.store(out + pid * BLOCK + i, sums)


def run_lane_sums(arch: int, change: Callable[[str], str] = lambda ptx: ptx, seed: int | None = None) -> None:
    block, programs = 256, 4
    types = {"out": "*fp32", "x": "*fp32", "partials": "*fp32", "arrivals": "*i64"}
    kernel = compiled(lane_sums_kernel, arch, **types, BLOCK=block)
    ptx = change(kernel.asm["ptx"])
    x = np.random.default_rng(0).integers(0, 100, (programs, block)).astype(np.float32)
    memory = Memory()
    out, x_at, partials = memory.put(np.zeros_like(x)), memory.put(x, writable=False), memory.put(np.zeros_like(x))
    args = [out, x_at, partials, memory.put(np.zeros(1, np.int64))]
    for _ in range(2):
        Kernel(ptx).run(memory, args, programs, 128, kernel.metadata.shared, seed, find_races=True)
        sums = memory.get(out, x.size, np.float32).reshape(x.shape)
        np.testing.assert_array_equal(sums, np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", [None, 0])
def test_no_race_is_found_where_a_grid_barrier_stands_between(arch: int, seed: int | None) -> None:
    run_lane_sums(arch, seed=seed)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("order", [".release", ".acquire"])
def test_a_race_is_found_when_the_compiled_barrier_loses_an_order(arch: int, order: str) -> None:
    with pytest.raises(RaceError, match="no order between them"):
        run_lane_sums(arch, lambda ptx: ptx.replace(order, ".relaxed"))


def test_a_race_is_found_when_the_order_does_not_reach_other_programs() -> None:
    with pytest.raises(RaceError, match="no order between them"):
        run_lane_sums(90, lambda ptx: ptx.replace(".gpu.release", ".cta.release"))


def test_a_race_is_found_when_a_program_does_not_gather_before_it_arrives() -> None:
    def without_barrier_before_arrival(ptx: str) -> str:
        before, release, after = ptx.partition(".release")
        return re.sub(r"bar\.sync\s+0;", "", before) + release + after

    with pytest.raises(RaceError, match="no order between them"):
        run_lane_sums(90, without_barrier_before_arrival)


def test_a_race_is_found_when_something_is_written_after_the_release() -> None:
    ptx = hand_written(
        """
        mov.u32 %r1, %ctaid.x;
        setp.ne.b32 %p1, %r1, 0;
        @%p1 bra $wait;
        BEFORE
        red.global.gpu.release.add.u32 [%rd1], 1;
        AFTER
        bra.uni $done;
    $wait:
        ld.global.gpu.acquire.b32 %r2, [%rd1];
        setp.ne.b32 %p2, %r2, 32;
        @%p2 bra $wait;
        ld.global.b32 %r3, [%rd1 + 4];
    $done:
        """
    )
    store = "st.global.b32 [%rd1 + 4], %r1;"
    for before, after in ((store, ""), ("", store)):
        memory = Memory()
        kernel = Kernel(ptx.replace("BEFORE", before).replace("AFTER", after))
        with pytest.raises(RaceError) if after else contextlib.nullcontext():
            kernel.run(memory, [memory.put(np.zeros(2, np.uint32))], programs=2, threads=32, find_races=True)


def test_a_race_is_found_when_one_program_overwrites_what_another_reads() -> None:
    ptx = hand_written(
        """
        mov.u32 %r1, %ctaid.x;
        setp.ne.b32 %p1, %r1, 0;
        ld.global.b32 %r2, [%rd1];
        @%p1 st.global.b32 [%rd1], %r1;
        """
    )
    memory = Memory()
    at = memory.put(np.zeros(1, np.uint32))
    with pytest.raises(RaceError, match="overwrites what program 0"):
        Kernel(ptx).run(memory, [at], programs=2, threads=32, find_races=True)


def test_other_seeds_interleave_programs_otherwise() -> None:
    """Each warp takes a number from one counter: the order in which they come is the order of execution."""
    ptx = hand_written(
        """
        mov.u32 %r1, %tid.x;
        and.b32 %r2, %r1, 31;
        setp.ne.b32 %p1, %r2, 0;
        @%p1 bra $done;
        atom.global.gpu.relaxed.add.u32 %r3, [%rd1], 1;
        mov.u32 %r4, %ctaid.x;
        mul.wide.u32 %rd2, %r3, 4;
        add.s64 %rd3, %rd1, %rd2;
        st.global.b32 [%rd3 + 4], %r4;
    $done:
        """
    )
    orders = set()
    for seed in range(5):
        memory = Memory()
        at = memory.put(np.zeros(9, np.uint32))
        Kernel(ptx).run(memory, [at], programs=4, threads=64, seed=seed)
        order = memory.get(at, 9, np.uint32)[1:]
        np.testing.assert_array_equal(np.sort(order), np.repeat(np.arange(4), 2))
        orders.add(tuple(order))
    assert len(orders) == 5


def test_code_that_waits_for_code_behind_it_ends() -> None:
    """Program 0 spins at the top until program 1, which jumped far down, lets it go."""
    ptx = hand_written(
        """
        mov.u32 %r1, %ctaid.x;
        setp.ne.b32 %p1, %r1, 0;
        @%p1 bra $release;
    $spin:
        ld.global.gpu.acquire.b32 %r2, [%rd1];
        setp.eq.b32 %p2, %r2, 0;
        @%p2 bra $spin;
        bra.uni $done;
    $release:
        st.global.b32 [%rd1], %r1;
    $done:
        """
    )
    memory = Memory()
    Kernel(ptx).run(memory, [memory.put(np.zeros(1, np.uint32))], programs=2, threads=32)


def test_a_barrier_that_some_threads_leave_out_is_a_deadlock_or_the_end() -> None:
    """Threads that returned do not count, so a barrier opens for the rest; a spinning warp is stopped by the limit."""
    start = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32;"
    left = hand_written(f"{start} @%p1 bra $done; bar.sync 0; $done:")
    assert Kernel(left).run(Memory(), [0], programs=1, threads=64).barriers == 1
    spinning = hand_written(f"{start} $spin: @%p1 bra $spin; bar.sync 0;")
    with pytest.raises(RuntimeError, match="too many instructions"):
        Kernel(spinning).run(Memory(), [0], programs=1, threads=64, most_instructions=10_000)


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
