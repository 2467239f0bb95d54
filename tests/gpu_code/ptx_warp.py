"""Instructions in which the lanes of a warp see each other's registers."""

from __future__ import annotations

import numpy as np

from .ptx_compute import BINARY
from .ptx_parser import Instruction
from .ptx_state import WARP, Execute, Lanes, Operands, State
from .ptx_types import TYPES, Array, type_of


def compile_shuffle(instruction: Instruction, operands: Operands) -> Execute:
    """shfl.sync.bfly: read a register of another lane of the warp, which must execute the same instruction now."""
    target, source, distance, clamp, _ = instruction.operands
    if "bfly" not in instruction.parts or clamp != "31":
        raise NotImplementedError(instruction.text)
    word = TYPES["b32"]
    write = operands.write(target, word)
    read, read_distance = (operands.read(operand, word) for operand in (source, distance))

    def execute(state: State, lanes: Lanes) -> None:
        chosen = state.lane[lanes] ^ (read_distance(state, lanes).astype(np.int64) & 31)
        _require_active(state, lanes, chosen, instruction)
        write(state, lanes, np.broadcast_to(read(state, slice(None)), state.lane.shape)[chosen])

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
    if not {"abs", "NaN"}.isdisjoint(instruction.parts):
        raise NotImplementedError(instruction.text)
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
