"""How many bytes each thread has on their way from memory at once, in each loop of NVIDIA's machine code.

A thread issues its instructions in order and waits at the first one that reads the result of a load. What it has asked
for until then is in flight together.
"""

from __future__ import annotations

import re
from typing import NamedTuple

REGISTER = re.compile(r"\bR(\d+)\b")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.M)


class Instruction(NamedTuple):
    address: int
    opcode: str
    operands: str

    @property
    def is_load(self) -> bool:
        """From global memory, and not to synchronise."""
        return self.opcode.split(".")[0] in ("LDG", "LD") and "STRONG" not in self.opcode

    @property
    def is_store(self) -> bool:
        return self.opcode.split(".")[0] in ("STG", "ST") and "STRONG" not in self.opcode

    @property
    def is_spill(self) -> bool:
        return self.opcode.startswith(("LDL", "STL"))

    @property
    def bytes(self) -> int:
        widths = (re.fullmatch(r"[US]?(8|16|64|128|256)", part) for part in self.opcode.split("."))
        return next((int(width[1]) // 8 for width in widths if width), 4)

    @property
    def loaded_registers(self) -> set[int]:
        first = REGISTER.match(self.operands)
        return set(range(int(first[1]), int(first[1]) + max(1, self.bytes // 4))) if first else set()

    @property
    def read_registers(self) -> set[int]:
        """Those of its operands but the first, which most instructions write to; of a store all."""
        operands = self.operands if self.opcode.startswith("ST") else self.operands.partition(",")[2]
        return {int(number) for number in REGISTER.findall(operands)}


def read_sass(sass: str) -> list[Instruction]:
    return [Instruction(int(address, 16), *rest) for address, *rest in INSTRUCTION.findall(sass)]


def inner_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Returns the loops that contain no other loop: what lies between a branch back and where it leads."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    loops = []
    for end, instruction in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", instruction.operands)
        if instruction.opcode.startswith("BRA") and target and int(target[1], 16) <= instruction.address:
            loops.append((place[int(target[1], 16)], end))
    others_within = [sum(start <= a and b <= end for a, b in loops) - 1 for start, end in loops]
    return [code[start : end + 1] for (start, end), others in zip(loops, others_within, strict=True) if not others]


def bytes_in_flight(loop: list[Instruction]) -> int:
    """Returns the most bytes that one thread has asked for and not waited for yet."""
    pending: dict[frozenset[int], int] = {}
    most = 0
    for instruction in loop:
        arrived = [registers for registers in pending if registers & instruction.read_registers]
        for registers in arrived:
            del pending[registers]
        if instruction.is_load:
            pending[frozenset(instruction.loaded_registers)] = instruction.bytes
            most = max(most, sum(pending.values()))
    return most


def flights_of_whole_blocks(loops: list[list[Instruction]]) -> list[int]:
    """Returns the bytes in flight for each loop over aligned elements: those with loads of 128 bits, and with loads of
    64 bits those that take roots. Others walk over tables, or over what is not aligned."""
    return [bytes_in_flight(loop) for loop in loops if _widest_load(loop) >= (8 if _takes_roots(loop) else 16)]


def _widest_load(loop: list[Instruction]) -> int:
    return max((instruction.bytes for instruction in loop if instruction.is_load), default=0)


def _takes_roots(loop: list[Instruction]) -> bool:
    """Of float32 numbers. Of float64 an element has 64 bits by itself."""
    return any(instruction.opcode == "MUFU.RSQ" for instruction in loop)
