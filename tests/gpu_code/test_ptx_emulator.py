"""What the PTX emulator refuses and finds, in PTX written by hand.

That it executes compiled kernels correctly shows in test_emulated_kernels.py, whose steps are compared with the
definition. These tests hold what steps cannot show: faults that it must find.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from .ptx_emulator import AccessError, Kernel, Memory, Statistics, span_of
from .ptx_memory import READABLE


def hand_written(body: str) -> Kernel:
    return Kernel(f"""
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
    """)


def run(
    body: str, array: np.ndarray, programs: int = 1, threads: int = 32, rights: int = 3, **options: object
) -> Statistics:
    """The array's address is in %rd1."""
    memory = Memory([span_of(array, rights)])
    return hand_written(body).run(memory, [array.ctypes.data], programs, threads, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        *("add.rp.f32 %r1, %r1, %r1;", "wgmma.fence.sync;", "bar.sync 1;", "add.s32 %r1, %r1, %r2, %r3;"),
        *("setp.lt.and.s32 %p1, -1, 1, %p3;", "bfe.s32 %r1, %r2, 8, 8;", "trap;"),
    ],
)
def test_what_is_not_known_is_refused_before_the_run(body: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(body.rstrip(";"))):
        hand_written(body)


# --- Accesses


@pytest.mark.parametrize(
    ("access", "match"),
    [
        ("ld.global.b32 %r1, [%rd1 + 256];", "outside of what the kernel was given"),
        ("st.global.b32 [%rd1], %r1;", "not writable"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1 + 4];", "misaligned: 16 bytes"),
    ],
)
def test_an_access_that_a_gpu_would_refuse_stops_the_run(access: str, match: str) -> None:
    with pytest.raises(AccessError, match=match):
        run(access, np.zeros(64, np.uint32), rights=READABLE)


# --- Orders of programs


def test_other_seeds_interleave_programs_otherwise() -> None:
    """Each warp takes a number from one counter: the order in which they come is the order of execution."""
    body = """
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
    orders = set()
    for seed in range(5):
        taken = np.zeros(9, np.uint32)
        run(body, taken, programs=4, threads=64, seed=seed)
        orders.add(tuple(taken[1:]))
    assert {tuple(sorted(order)) for order in orders} == {(0, 0, 1, 1, 2, 2, 3, 3)}
    assert len(orders) == 5
