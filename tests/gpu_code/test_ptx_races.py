"""The emulator's programs in any order: barriers among them, the races that it must find, and deadlocks."""

# ruff: noqa: N803 (constants of Triton kernels are upper case)

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import numpy as np
import pytest
import triton
import triton.language as tl

from tests.gpu_code.ptx_emulator import Kernel, Memory, RaceError
from tests.gpu_code.test_ptx_emulator import (
    ARCHITECTURES,
    compiled,
    hand_written,
    run,
)


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
