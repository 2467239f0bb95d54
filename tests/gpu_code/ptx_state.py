"""What a run changes: registers, shared memory, global memory, statistics; and how an operand reads or writes it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .ptx_memory import Bank, Memory, Statistics
from .ptx_parser import Code
from .ptx_races import Races
from .ptx_types import SIGNED, UNSIGNED, Array, Type

WARP = 32

Lanes = slice | Array  # which lanes execute: a slice costs no copy when registers are read
Execute = Callable[["State", Lanes], None]
Read = Callable[["State", Lanes], Array]
Write = Callable[["State", Lanes, Array], None]


class State:
    """One lane for each thread of the grid, in the order of programs."""

    def __init__(self, code: Code, memory: Memory, parameters: Array, programs: int, threads: int, shared: int) -> None:
        n = programs * threads
        self.memory = memory
        self.parameters = parameters
        self.shared_size = code.static_shared_bytes + shared
        self.shared = Bank(np.zeros(programs * self._shared_stride(), np.uint8))
        self.statistics = Statistics()
        self.races: Races | None = None
        self.registers = [np.zeros(n, bool if width == 1 else UNSIGNED[width]) for width in code.registers.values()]
        self.lane = np.arange(n)
        self.warp = self.lane // WARP
        self.program = self.lane // threads
        self.thread = self.lane % threads
        self.shared_base = self.program * self._shared_stride()
        self.special = {
            "%tid.x": self.thread.astype(np.uint32),
            "%ctaid.x": self.program.astype(np.uint32),
            "%nctaid.x": np.full(n, programs, np.uint32),
            "%laneid": (self.lane % WARP).astype(np.uint32),
        }

    def _shared_stride(self) -> int:
        return -(-self.shared_size // 128) * 128


class Operands:
    """Readers and writers, made once for each operand of each instruction.

    Only loads, stores and conversions may use a register `wider` than the type.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.index = {name: i for i, name in enumerate(code.registers)}

    def read(self, operand: str, kind: Type, *, wider: bool = False) -> Read:
        if operand in self.index:
            index, width = self.index[operand], self.code.registers[operand]
            if width == kind.width:
                return lambda state, lanes: kind.values(state.registers[index][lanes])
            if width < kind.width or kind.width == 1 or not wider:
                raise ValueError(f"{operand} has {width} bits and cannot be read as {kind.name}")
            narrow = UNSIGNED[kind.width]
            return lambda state, lanes: kind.values(state.registers[index][lanes].astype(narrow))
        if operand.startswith("%"):
            dtype = UNSIGNED[kind.width]
            return lambda state, lanes: kind.values(state.special[operand][lanes].astype(dtype))
        if kind.name == "pred":
            value = np.array([bool(self.constant(operand))])
        else:
            value = kind.values(np.array([self.constant(operand) & (2**kind.width - 1)], UNSIGNED[kind.width]))
        return lambda state, lanes: value

    def write(self, operand: str, kind: Type, *, wider: bool = False) -> Write:
        """Narrow results fill a wider register: signed ones with their sign, others with zeros."""
        if operand == "_":
            return lambda state, lanes, values: None
        index, width = self.index[operand], self.code.registers[operand]
        if width < kind.width or (width > kind.width and not wider):
            raise ValueError(f"{operand} has {width} bits and cannot take {kind.name}")
        signed = SIGNED[kind.width] if kind.kind == "signed" and width > kind.width else None

        def write(state: State, lanes: Lanes, values: Array) -> None:
            bits = kind.bits(values)
            state.registers[index][lanes] = bits if signed is None else bits.view(signed)

        return write

    def address(self, operand: str) -> Read:
        """[register + offset] or [symbol + offset], as int64; always a new array."""
        inside = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if inside is None:
            raise ValueError(f"cannot read the address {operand}")
        base, offset = inside[1], int(inside[2] or "0", 0)
        if base in self.index:
            index = self.index[base]
            return lambda state, lanes: state.registers[index][lanes].astype(np.int64) + offset
        fixed = self.constant(base) + offset
        return lambda state, lanes: np.full(state.lane[lanes].size, fixed, np.int64)

    def constant(self, operand: str) -> int:
        """The bits of an immediate, or the address of a shared symbol."""
        if operand in self.code.shared:
            return self.code.shared[operand]
        if operand[:2].lower() in ("0f", "0d"):
            return int(operand[2:], 16)
        try:
            return int(operand.rstrip("U"), 0)
        except ValueError:
            raise NotImplementedError(f"operand {operand!r}: neither a register, a number nor a shared array") from None
