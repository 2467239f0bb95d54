"""Instructions that touch memory: loads, stores, atomics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .ptx_memory import READABLE, WRITABLE, AccessError, Bank
from .ptx_parser import Instruction, elements
from .ptx_state import Execute, Lanes, Operands, State, Write
from .ptx_types import TYPES, UNSIGNED, Array, Type, type_of

Access = Callable[[State, Lanes], tuple[Bank, Array]]

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
    if space_of(instruction) == "param":
        return _load_parameter(instruction, operands, raw, *writes)
    access = _access(instruction, operands, instruction.operands[1], kind.width // 8 * len(writes), READABLE)

    def execute(state: State, lanes: Lanes) -> None:
        bank, at = access(state, lanes)
        for i, write in enumerate(writes):
            write(state, lanes, raw.values(bank.load(at, kind.width, i)))

    return execute


def _load_parameter(instruction: Instruction, operands: Operands, raw: Type, write: Write) -> Execute:
    name, _, offset = instruction.operands[1].strip("[] ").partition("+")
    parameter = next(p for p in operands.code.parameters if p.name == name.strip())
    start = parameter.offset + int(offset or "0", 0)
    where = slice(start, start + raw.width // 8)
    return lambda state, lanes: write(
        state, lanes, raw.values(state.parameters[where].copy().view(UNSIGNED[raw.width]))
    )


def compile_store(instruction: Instruction, operands: Operands) -> Execute:
    kind = type_of(instruction.opcode)
    raw = TYPES[f"b{kind.width}"]
    reads = [operands.read(r, raw, wider=True) for r in elements(instruction.operands[1])]
    access = _access(instruction, operands, instruction.operands[0], kind.width // 8 * len(reads), WRITABLE)

    def execute(state: State, lanes: Lanes) -> None:
        bank, at = access(state, lanes)
        for i, read in enumerate(reads):
            bank.store(at, kind.width, i, read(state, lanes))

    return execute


def compile_atomic(instruction: Instruction, operands: Operands) -> Execute:
    """atom.add. Lanes take their turns in order, as some order is all that a GPU promises."""
    known = "add" in instruction.parts and not SYNCHRONISING.isdisjoint(instruction.parts)
    if not known or space_of(instruction) != "global":
        raise NotImplementedError(instruction.text)
    kind = type_of(instruction.opcode)
    target, where, source = instruction.operands
    write, read = operands.write(target, kind), operands.read(source, kind)
    access = _access(instruction, operands, where, kind.width // 8, READABLE | WRITABLE)

    def execute(state: State, lanes: Lanes) -> None:
        bank, at = access(state, lanes)
        added = np.broadcast_to(read(state, lanes), at.shape)
        old_values = np.zeros(at.size, UNSIGNED[kind.width])
        for i in range(at.size):
            here = at[i : i + 1]
            old = bank.load(here, kind.width, 0)
            old_values[i] = old[0]
            bank.store(here, kind.width, 0, kind.bits(kind.values(old) + added[i : i + 1]))
        write(state, lanes, kind.values(old_values))

    return execute


def _access(instruction: Instruction, operands: Operands, operand: str, size: int, right: int) -> Access:
    """Returns a function that checks and counts an access of `size` bytes, and returns the bank and where in it."""
    space, address = space_of(instruction), operands.address(operand)
    is_synchronising = not SYNCHRONISING.isdisjoint(instruction.parts)

    def access(state: State, lanes: Lanes) -> tuple[Bank, Array]:
        at = address(state, lanes)
        check(state, lanes, at, size, right, space, instruction)
        if space == "shared":
            return state.shared, at + state.shared_base[lanes]
        if not is_synchronising:
            traffic = state.statistics.loads if right == READABLE else state.statistics.stores
            traffic.count(state.warp[lanes], at, size)
        if state.races and is_synchronising:
            for lane, byte in zip(state.lane[lanes], at, strict=True):
                state.races.synchronise(lane, int(byte), instruction)
        elif state.races:
            note = state.races.read if right == READABLE else state.races.write
            note(state.lane[lanes], at, size, instruction)
        return state.memory, at

    return access


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
