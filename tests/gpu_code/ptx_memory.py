"""The memory of a run: global arrays with gaps between them, shared memory, and what each access costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .ptx_types import UNSIGNED, Array

SECTOR = 32  # bytes; the unit in which the memory of an NVIDIA GPU is read and written
READABLE, WRITABLE = 1, 2
GAP = 256  # bytes after each array that nothing may touch; wider than any access


class AccessError(RuntimeError):
    """An access that a GPU would refuse, or that would touch what does not belong to the kernel."""


class Bank:
    """Bytes with a typed view for each width: an aligned access is one NumPy index."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(-(-size // 64) * 64, np.uint8)
        self.size = size
        self.by_width = {width: self.bytes.view(dtype) for width, dtype in UNSIGNED.items()}

    def load(self, address: Array, width: int, element: int) -> Array:
        return self.by_width[width][address // (width // 8) + element]

    def store(self, address: Array, width: int, element: int, bits: Array) -> None:
        self.by_width[width][address // (width // 8) + element] = bits


class Memory(Bank):
    """Global memory. Addresses are plain numbers; 0 to 4095 belong to nobody, as do the gaps."""

    def __init__(self, capacity: int = 1 << 26) -> None:
        super().__init__(capacity)
        self.access = np.zeros(self.bytes.size, np.uint8)
        self.top = 4096

    def put(self, array: Array, *, offset: int = 0, writable: bool = True) -> int:
        """Copy an array in and return its address, `offset` bytes past a multiple of 256."""
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        start = -(-(self.top + GAP) // 256) * 256 + offset
        end = start + raw.size
        if end + GAP > self.size:
            raise MemoryError(f"{raw.size} bytes do not fit: ask for more than Memory({self.size})")
        self.bytes[start:end] = raw
        self.access[start:end] = READABLE | (WRITABLE if writable else 0)
        self.top = end
        return start

    def get(self, address: int, count: int, dtype: type | np.dtype) -> Array:
        return self.bytes[address : address + count * np.dtype(dtype).itemsize].view(dtype).copy()

    def check(self, address: Array, size: int, right: int) -> Array | None:
        """Which lanes may not do this; None if all may. Arrays are far apart: both ends inside is all inside."""
        if address.size and (address.min() < 0 or address.max() + size > self.size):
            return (address < 0) | (address + size > self.size)
        bad = (self.access[address] & self.access[address + (size - 1)] & right) == 0
        return bad if bad.any() else None


@dataclass
class Traffic:
    """Global loads, or global stores.

    `requests` counts warps, `bytes` counts each byte once in a warp's request (a GPU serves lanes that read one address
    together), `lane_bytes` counts it for each lane, `sectors` counts the 32-byte sectors that a request touches.
    `requests_of_width` has the width in bits of one lane's access.
    """

    requests: int = 0
    bytes: int = 0
    lane_bytes: int = 0
    sectors: int = 0
    requests_of_width: Counter[int] = field(default_factory=Counter)

    def count(self, warp: Array, address: Array, size: int) -> None:
        """Accesses are aligned and at most a sector wide, so that each lies in one sector."""
        key = (warp << 48) | address
        if (key[1:] < key[:-1]).any():
            key = np.sort(key)
        requests = _distinct(key >> 48)
        self.requests += requests
        self.bytes += _distinct(key) * size
        self.lane_bytes += key.size * size
        self.sectors += _distinct(key // SECTOR)
        self.requests_of_width[8 * size] += requests


def _distinct(sorted_values: Array) -> int:
    return 1 + int(np.count_nonzero(sorted_values[1:] != sorted_values[:-1]))


@dataclass
class Statistics:
    """`synchronising` counts warps by opcode: atomics and acquiring loads, which a spin loop repeats at will."""

    loads: Traffic = field(default_factory=Traffic)
    stores: Traffic = field(default_factory=Traffic)
    synchronising: Counter[str] = field(default_factory=Counter)
    warp_instructions: int = 0
    float64_instructions: int = 0  # of these, those of the unit for float64, which is narrow on most GPUs
    barriers: int = 0

    @property
    def bytes(self) -> int:
        return self.loads.bytes + self.stores.bytes

    @property
    def sector_bytes(self) -> int:
        return SECTOR * (self.loads.sectors + self.stores.sectors)
