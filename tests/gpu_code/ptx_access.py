"""Instructions that touch memory: loads, stores, atomics."""

from __future__ import annotations

import numpy as np

from .ptx_memory import READABLE, WRITABLE, AccessError
from .ptx_parser import Instruction, elements
from .ptx_state import Execute, Lanes, Operands, State
from .ptx_types import TYPES, UNSIGNED, Array, Type, type_of

SYNCHRONISING = {"acquire", "release", "acq_rel", "relaxed", "volatile"}
SPACES = {"global", "shared", "shared::cta", "param", "local", "const"}


def space_of(instruction: Instruction) -> str:
    """Where it goes. An address without a space is generic: here, global."""
    space = next((p for p in instruction.parts if p in SPACES), "global")
    if space in ("local", "const"):
        raise NotImplementedError(f"{space} memory: {instruction.text}")
    return "shared" if space == "shared::cta" else space


def compile_load(instruction: Instruction, operands: Operands) -> Execute:
    kind = type_of(instruction.opcode)
    raw = TYPES[f"{'s' if kind.kind == 'signed' else 'b'}{kind.width}"]
    writes = [operands.write(r, raw, wider=True) for r in elements(instruction.operands[0])]
    space = space_of(instruction)
    if space == "param":
        return _load_parameter(instruction, operands, raw, writes)
    address = operands.address(instruction.operands[1])
    size = kind.width // 8 * len(writes)
    synchronising = not SYNCHRONISING.isdisjoint(instruction.parts)

    def execute(state: State, lanes: Lanes) -> None:
        at = address(state, lanes)
        check(state, lanes, at, size, READABLE, space, instruction)
        if space == "shared":
            bank, at = state.shared, at + state.shared_base[lanes]
        else:
            bank = state.memory
            if synchronising:
                synchronise(state, lanes, at, instruction)
            else:
                state.statistics.loads.count(state.warp[lanes], at, size)
                if state.races:
                    state.races.read(state.lane[lanes], at, size, instruction)
        for i, write in enumerate(writes):
            write(state, lanes, raw.values(bank.load(at, kind.width, i)))

    return execute


def _load_parameter(instruction: Instruction, operands: Operands, raw: Type, writes: list) -> Execute:
    name, _, offset = instruction.operands[1].strip("[] ").partition("+")
    parameter = next(p for p in operands.code.parameters if p.name == name.strip())
    size = raw.width // 8
    start = parameter.offset + int(offset or "0", 0)

    def execute(state: State, lanes: Lanes) -> None:
        for i, write in enumerate(writes):
            at = start + i * size
            write(state, lanes, raw.values(state.parameters[at : at + size].copy().view(UNSIGNED[raw.width])))

    return execute


def compile_store(instruction: Instruction, operands: Operands) -> Execute:
    kind = type_of(instruction.opcode)
    raw = TYPES[f"b{kind.width}"]
    reads = [operands.read(r, raw, wider=True) for r in elements(instruction.operands[1])]
    address = operands.address(instruction.operands[0])
    size = kind.width // 8 * len(reads)
    space = space_of(instruction)
    synchronising = not SYNCHRONISING.isdisjoint(instruction.parts)

    def execute(state: State, lanes: Lanes) -> None:
        at = address(state, lanes)
        check(state, lanes, at, size, WRITABLE, space, instruction)
        if space == "shared":
            bank, at = state.shared, at + state.shared_base[lanes]
        else:
            bank = state.memory
            if synchronising:
                synchronise(state, lanes, at, instruction)
            else:
                state.statistics.stores.count(state.warp[lanes], at, size)
                if state.races:
                    state.races.write(state.lane[lanes], at, size, instruction)
        for i, read in enumerate(reads):
            bank.store(at, kind.width, i, read(state, lanes))

    return execute


def compile_atomic(instruction: Instruction, operands: Operands) -> Execute:
    """atom.add. Lanes take their turns in order, as some order is all that a GPU promises."""
    if "add" not in instruction.parts or space_of(instruction) != "global":
        raise NotImplementedError(instruction.text)
    kind = type_of(instruction.opcode)
    target, where, source = instruction.operands
    write, address, read = operands.write(target, kind), operands.address(where), operands.read(source, kind)

    def execute(state: State, lanes: Lanes) -> None:
        at = address(state, lanes)
        check(state, lanes, at, kind.width // 8, READABLE | WRITABLE, "global", instruction)
        synchronise(state, lanes, at, instruction)
        added = np.broadcast_to(read(state, lanes), at.shape)
        old_values = np.zeros(at.size, UNSIGNED[kind.width])
        for i in range(at.size):
            here = at[i : i + 1]
            old = state.memory.load(here, kind.width, 0)
            old_values[i] = old[0]
            state.memory.store(here, kind.width, 0, kind.bits(kind.values(old) + added[i : i + 1]))
        write(state, lanes, kind.values(old_values))

    return execute


def synchronise(state: State, lanes: Lanes, at: Array, instruction: Instruction) -> None:
    state.statistics.synchronising[instruction.opcode] += np.unique(state.warp[lanes]).size
    if state.races:
        for lane, address in zip(state.lane[lanes], at, strict=True):
            state.races.synchronise(lane, int(address), instruction)


def check(state: State, lanes: Lanes, at: Array, size: int, right: int, space: str, instruction: Instruction) -> None:
    misaligned = at & (size - 1)
    if misaligned.any():
        _stop(state, lanes, at, misaligned != 0, f"misaligned: {size} bytes at", instruction)
    if space == "shared":
        if at.size and (at.min() < 0 or at.max() + size > state.shared_size):
            bad = (at < 0) | (at + size > state.shared_size)
            _stop(state, lanes, at, bad, f"outside the {state.shared_size} bytes of shared memory:", instruction)
    elif (bad := state.memory.check(at, size, right)) is not None:
        what = "outside of what the kernel was given, or not writable:"
        _stop(state, lanes, at, bad, what, instruction)


def _stop(state: State, lanes: Lanes, at: Array, bad: Array, what: str, instruction: Instruction) -> None:
    first = int(np.flatnonzero(bad)[0])
    lane = state.lane[lanes][first]
    who = f"program {state.program[lane]}, thread {state.thread[lane]}"
    raise AccessError(f"{what} {at[first]:#x} ({who}, {np.count_nonzero(bad)} lanes in all) in {instruction.text}")
