"""Run unmodified PTX on the CPU with NumPy: every thread of the grid is a lane, lanes at one instruction go together.

    x = np.arange(1000, dtype=np.float32)
    memory = Memory([span_of(x)])
    Kernel(compiled.asm["ptx"]).run(memory, [x.ctypes.data, 1000], programs=4, threads=128, shared_bytes=64)

It shows what the compiled code computes, that every access is inside an array and aligned, and how many bytes, sectors
and instructions that took. Memory is sequentially consistent and the order of lanes fixed; a `seed` gives another order
of the warps, `find_races` stops at accesses that no order ties together. Programs run together, so that a barrier among
them opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import ptx_compute
from .ptx_access import compile_atomic, compile_load, compile_store
from .ptx_bits import compile_bit_field, compile_permute, compile_shift
from .ptx_memory import AccessError, Memory, Statistics, span_of
from .ptx_parser import Instruction, Parameter, parse
from .ptx_races import RaceError, Races
from .ptx_scheduler import Scheduler, Step
from .ptx_state import WARP, Execute, Operands, State
from .ptx_types import Array
from .ptx_warp import compile_shuffle, compile_warp_reduction

__all__ = ["AccessError", "Kernel", "Memory", "RaceError", "Statistics", "span_of"]

Compiler = Callable[[Instruction, Operands], Execute]

COMPILERS: dict[str, Compiler] = {
    **dict.fromkeys(ptx_compute.UNARY, ptx_compute.compile_unary),
    **dict.fromkeys(ptx_compute.BINARY, ptx_compute.compile_binary),
    **dict.fromkeys(("mul", "mad", "fma"), ptx_compute.compile_multiply),
    **dict.fromkeys(("shl", "shr"), compile_shift),
    "atom": compile_atomic,
    "ld": compile_load,
    "st": compile_store,
    "mov": ptx_compute.compile_move,
    "div": ptx_compute.compile_divide,
    "bfe": compile_bit_field,
    "prmt": compile_permute,
    "setp": ptx_compute.compile_compare,
    "selp": ptx_compute.compile_select,
    "cvt": ptx_compute.compile_convert,
    "shfl": compile_shuffle,
    "redux": compile_warp_reduction,
}


MOVES = ("ld", "st", "mov", "selp")  # which no arithmetic unit is needed for


class Kernel:
    """Compiled once, run as often as wanted."""

    def __init__(self, ptx: str, name: str | None = None) -> None:
        self.code = parse(ptx, name)
        operands = Operands(self.code)
        self.steps = [self._step(i, operands) for i in self.code.instructions]

    def _step(self, instruction: Instruction, operands: Operands) -> Step:
        guard = None if instruction.guard is None else operands.index[instruction.guard]
        common: Any = {"text": instruction.text, "guard": guard, "guard_negated": instruction.guard_negated}
        common["is_float64"] = "f64" in instruction.parts and instruction.base not in MOVES
        if instruction.base == "bra":
            return Step("branch", target=self.code.labels[instruction.operands[0]], **common)
        if instruction.base == "ret":
            return Step("return", **common)
        if instruction.base == "bar":
            if instruction.opcode != "bar.sync" or instruction.operands != ("0",):
                raise NotImplementedError(f"only barrier 0 of the whole program is known: {instruction.text}")
            return Step("barrier", **common)
        if instruction.base not in COMPILERS:
            raise NotImplementedError(f"unknown instruction: {instruction.text}")
        return Step("compute", execute=COMPILERS[instruction.base](instruction, operands), **common)

    def run(
        self,
        memory: Memory,
        args: Sequence[int],
        programs: int,
        threads: int,
        shared_bytes: int = 0,
        seed: int | None = None,
        find_races: bool = False,
        most_instructions: int = 10**7,
    ) -> Statistics:
        """`shared_bytes` is the dynamic shared memory, `metadata.shared` in Triton. Missing arguments are zero."""
        if threads % WARP:
            raise ValueError(f"{threads} threads: a whole number of warps of {WARP} is wanted")
        parameters = pack(self.code.parameters, args)
        state = State(self.code, memory, parameters, programs, threads, shared_bytes)
        if find_races:
            state.races = Races(memory, programs, threads)
        with np.errstate(all="ignore"):
            Scheduler(self.steps, state, threads, seed, most_instructions).run()
        return state.statistics


def pack(parameters: list[Parameter], args: Sequence[int]) -> Array:
    """Arguments as bytes, each as its parameter declares it."""
    if len(args) > len(parameters):
        raise ValueError(f"{len(args)} arguments for {len(parameters)} parameters")
    block = np.zeros(max((p.offset + p.size for p in parameters), default=0), np.uint8)
    for parameter, value in zip(parameters, args, strict=False):
        raw = (value % 2 ** (8 * parameter.size)).to_bytes(parameter.size, "little")
        block[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(raw, np.uint8)
    return block
