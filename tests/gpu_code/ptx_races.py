"""Which accesses to global memory have no order between them, in the PTX as it was executed.

Each lane has a vector clock: what it knows of every lane's progress. bar.sync merges the clocks of a program; a release
leaves the lane's clock at the counter's address, an acquire of that address takes it up. A load or store of something
that a lane wrote, or a store to something that a lane read, must know of that access: else it is a race, whatever value
came out. Of the readers of one program only the last is remembered. Shared memory is not watched.
"""

from __future__ import annotations

import numpy as np

from .ptx_memory import Memory
from .ptx_parser import Instruction
from .ptx_types import Array

NOBODY = -1


class RaceError(RuntimeError):
    """Two accesses to one address without an order between them."""


class Races:
    def __init__(self, memory: Memory, programs: int, threads: int) -> None:
        lanes, size = programs * threads, int(memory.sizes.sum())
        self.memory = memory
        self.threads = threads
        self.known = np.zeros((lanes, lanes), np.int32)
        np.fill_diagonal(self.known, 1)
        self.released: dict[int, Array] = {}
        self.writer, self.written = np.full(size, NOBODY), np.zeros(size, np.int32)
        self.reader, self.read_at = np.full((programs, size), NOBODY), np.zeros((programs, size), np.int32)

    def read(self, lane: Array, address: Array, size: int, instruction: Instruction) -> None:
        for byte in self.memory.place(address) + np.arange(size)[:, None]:
            self._require(lane, self.writer[byte], self.written[byte], "read what", "wrote", instruction)
            program = lane // self.threads
            self.reader[program, byte] = lane
            self.read_at[program, byte] = self.known[lane, lane]

    def write(self, lane: Array, address: Array, size: int, instruction: Instruction) -> None:
        for byte in self.memory.place(address) + np.arange(size)[:, None]:
            self._require(lane, self.writer[byte], self.written[byte], "overwrites what", "wrote", instruction)
            for reader, read_at in zip(self.reader, self.read_at, strict=True):
                self._require(lane, reader[byte], read_at[byte], "overwrites what", "read", instruction)
            self.writer[byte] = lane
            self.written[byte] = self.known[lane, lane]

    def synchronise(self, lane: int, address: int, instruction: Instruction) -> None:
        """An atomic, or a load or store with an order: what it gives and takes depends on that order and its scope."""
        if {"gpu", "sys"}.isdisjoint(instruction.parts):
            return
        if not {"acquire", "acq_rel"}.isdisjoint(instruction.parts) and address in self.released:
            np.maximum(self.known[lane], self.released[address], out=self.known[lane])
        if not {"release", "acq_rel"}.isdisjoint(instruction.parts):
            before = self.released.get(address, np.zeros_like(self.known[lane]))
            self.released[address] = np.maximum(before, self.known[lane])
            self.known[lane, lane] += 1

    def barrier(self, lanes: Array) -> None:
        self.known[lanes] = self.known[lanes].max(0)
        self.known[lanes, lanes] += 1

    def _require(self, lane: Array, other: Array, at: Array, does: str, did: str, instruction: Instruction) -> None:
        race = (other != NOBODY) & (other != lane) & (at > self.known[lane, other])
        if race.any():
            i = int(np.flatnonzero(race)[0])
            one, two = (f"program {n // self.threads}, thread {n % self.threads}" for n in (lane[i], other[i]))
            raise RaceError(f"{one} {does} {two} {did}, with no order between them: {instruction.text}")
