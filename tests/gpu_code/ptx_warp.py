"""Instructions in which the lanes of a warp see each other's registers, or each other's addresses."""

from __future__ import annotations

import numpy as np

from .ptx_access import check
from .ptx_compute import BINARY
from .ptx_memory import READABLE, WRITABLE
from .ptx_parser import Instruction, elements
from .ptx_state import WARP, Execute, Lanes, Operands, State
from .ptx_types import TYPES, Array, type_of


def compile_shuffle(instruction: Instruction, operands: Operands) -> Execute:
    """shfl.sync: read a register of another lane of the warp, which must execute the same instruction now."""
    mode = next(p for p in instruction.parts if p in ("up", "down", "bfly", "idx"))
    target, *predicate = [t.strip() for t in instruction.operands[0].split("|")]
    word = TYPES["b32"]
    write = operands.write(target, word)
    write_predicate = operands.write(predicate[0], TYPES["pred"]) if predicate else None
    source, distance, clamp = (operands.read(o, word) for o in instruction.operands[1:4])

    def execute(state: State, lanes: Lanes) -> None:
        lane = state.lane[lanes]
        own = lane % WARP
        b = distance(state, lanes).astype(np.int64) & 31
        c = clamp(state, lanes).astype(np.int64)
        segment = (c >> 8) & 31
        last = (own & segment) | (c & 31 & ~segment)
        other = {"up": own - b, "down": own + b, "bfly": own ^ b, "idx": (own & segment) | (b & ~segment)}[mode]
        inside = other >= last if mode == "up" else other <= last
        chosen = lane - own + np.where(inside, other, own)
        _require_active(state, lanes, chosen, instruction)
        everywhere = np.broadcast_to(source(state, slice(None)), state.lane.shape)
        write(state, lanes, everywhere[chosen])
        if write_predicate is not None:
            write_predicate(state, lanes, inside)

    return execute


def _require_active(state: State, lanes: Lanes, chosen: Array, instruction: Instruction) -> None:
    if isinstance(lanes, slice) and lanes.start % WARP == 0 and lanes.stop % WARP == 0:
        return
    active = np.zeros(state.lane.size, bool)
    active[lanes] = True
    if not active[chosen].all():
        raise RuntimeError(f"a lane is read that does not take part: {instruction.text}")


def compile_warp_reduction(instruction: Instruction, operands: Operands) -> Execute:
    """redux.sync: one number from the lanes of a warp that take part now; the mask must name exactly these."""
    kind = type_of(instruction.opcode)
    reduce = BINARY[next(p for p in instruction.parts if p in ("add", "min", "max", "and", "or", "xor"))]
    if "abs" in instruction.parts:
        raise NotImplementedError(instruction.text)
    if "NaN" in instruction.parts:
        reduce = {np.fmin: np.minimum, np.fmax: np.maximum}[reduce]
    write = operands.write(instruction.operands[0], kind)
    source, members = operands.read(instruction.operands[1], kind), operands.read(instruction.operands[2], TYPES["u32"])

    def execute(state: State, lanes: Lanes) -> None:
        lane = state.lane[lanes]
        values = np.broadcast_to(source(state, lanes), lane.shape)
        masks = np.broadcast_to(members(state, lanes), lane.shape)
        result = values.copy()
        for warp in np.unique(lane // WARP):
            own = lane // WARP == warp
            if np.bitwise_or.reduce(np.uint32(1) << (lane[own] % WARP).astype(np.uint32)) != masks[own][0]:
                raise RuntimeError(f"other lanes take part than the mask says: {instruction.text}")
            result[own] = reduce.reduce(values[own])
        write(state, lanes, result)

    return execute


ROWS = 8  # of a matrix, of 16 bytes each


def compile_matrix_access(instruction: Instruction, operands: Operands) -> Execute:
    """ldmatrix, stmatrix: matrices of 8 rows of 8 16-bit numbers in shared memory.

    Lanes 0 to 7 have the addresses of the first one's rows, the next 8 those of the second one's. Lane i has numbers
    2 (i mod 4) and the next one of row i / 4, or of that column.
    """
    if not {"m8n8", "b16"} <= set(instruction.parts) or not {"shared", "shared::cta"} & set(instruction.parts):
        raise NotImplementedError(instruction.text)
    transposed = "trans" in instruction.parts
    loads = instruction.base == "ldmatrix"
    word = TYPES["b32"]
    where, registers = instruction.operands[::-1] if loads else instruction.operands
    address = operands.address(where)
    accesses = [(operands.write if loads else operands.read)(register, word) for register in elements(registers)]
    own = np.arange(WARP)

    def execute(state: State, lanes: Lanes) -> None:
        at = address(state, lanes)
        lane = state.lane[lanes]
        if lane.size % WARP or (lane.reshape(-1, WARP) % WARP != own).any():
            raise RuntimeError(f"a whole warp must take part: {instruction.text}")
        check(state, lanes, at, 2 * ROWS, READABLE if loads else WRITABLE, "shared", instruction)
        at = (at + state.shared_base[lanes]).reshape(-1, WARP)
        for matrix, access in enumerate(accesses):
            words = np.zeros(lane.size, np.uint32) if loads else word.bits(access(state, lanes))
            for half in (0, 1):
                pair, single = 2 * (own % 4) + half, own // 4
                row, column = (pair, single) if transposed else (single, pair)
                here = (at[:, ROWS * matrix + row] + 2 * column).ravel()
                if loads:
                    words |= state.shared.load(here, 16, 0).astype(np.uint32) << np.uint32(16 * half)
                else:
                    state.shared.store(here, 16, 0, (words >> np.uint32(16 * half)).astype(np.uint16))
            if loads:
                access(state, lanes, word.values(words))

    return execute
