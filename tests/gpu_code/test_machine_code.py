"""The readers of machine code, on kernels whose machine code is known."""

# ruff: noqa: N803 (constants of Triton kernels are upper case)

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpu_code.machine_code import MachineCode, read_amdgcn, read_cubin


@triton.jit
def sum_kernel(out, x, n, BLOCK: tl.constexpr, UNROLLED: tl.constexpr):
    """Each addition depends on what was stored before, so that loads of the next round cannot come earlier."""
    lanes = tl.arange(0, BLOCK)
    for begin in tl.range(0, n, BLOCK * UNROLLED, loop_unroll_factor=1):
        blocks = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(UNROLLED):
            blocks += tl.load(tl.multiple_of(x + (begin + i * BLOCK + lanes), 16))
        tl.store(tl.multiple_of(out + lanes, 16), blocks)


@triton.jit
def outer_product_kernel(out, x, y, steps, N: tl.constexpr):
    """Keeps N * N sums at once: too many for the registers."""
    i = tl.arange(0, N)
    sums = tl.zeros((N, N), tl.float32)
    for step in range(steps):
        sums += tl.load(x + step * N + i)[:, None] * tl.load(y + step * N + i)[None, :]
    tl.store(out + i[:, None] * N + i[None, :], sums)


def machine_code(kernel: object, arch: int | str, options: dict[str, int], **types: str | int) -> MachineCode:
    """In one warp. An integer among the types is a constant; pointers are aligned to 16 bytes."""
    pointers = [i for i, t in enumerate(types.values()) if str(t).startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if isinstance(t, int) else t for name, t in types.items()},
        constexprs={(i,): t for i, t in enumerate(types.values()) if isinstance(t, int)},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    compiled = triton.compile(source, target=target, options={"num_warps": 1, "enable_fp_fusion": True} | options)
    return read_cubin(compiled.asm["cubin"]) if isinstance(arch, int) else read_amdgcn(compiled.asm["amdgcn"])


pytestmark = pytest.mark.slow  # of tools that only tests use


@pytest.mark.parametrize("arch", [80, 90, 100, 120, "gfx942"])
def test_spills_are_seen(arch: int | str) -> None:
    few_registers = {"waves_per_eu": 8} if arch == "gfx942" else {"maxnreg": 48}
    code = machine_code(outer_product_kernel, arch, few_registers, out="*fp32", x="*fp32", y="*fp32", steps="i32", N=64)
    assert code.spills > 0
    assert code.stack_bytes > 0
    assert code.registers <= 64
    assert (code.spills_in_loops > 0) == isinstance(arch, int)


@pytest.mark.parametrize(("unrolled", "in_flight"), [(1, 16), (4, 64)])
def test_bytes_in_flight_are_what_is_loaded_before_a_thread_waits(unrolled: int, in_flight: int) -> None:
    types = {"out": "*fp32", "x": "*fp32", "n": "i32", "BLOCK": 128, "UNROLLED": unrolled}
    code = machine_code(sum_kernel, 90, {}, **types)
    assert (code.bytes_in_flight, code.spills, code.stack_bytes) == ([in_flight], 0, 0)
    assert (dict(code.loads), dict(code.stores)) == ({128: unrolled}, {128: 1})
