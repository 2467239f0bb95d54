"""The memory of a run: what a kernel may touch of this process's memory, shared memory, and what accesses cost."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .ptx_types import UNSIGNED, Array

SECTOR = 32  # bytes; the unit in which the memory of an NVIDIA GPU is read and written
READABLE, WRITABLE = 1, 2
FIRST, LAST = 1 << 12, 1 << 47  # addresses of a process


class AccessError(RuntimeError):
    """An access that a GPU would refuse, or that would touch what does not belong to the kernel."""


class Bank:
    """Bytes with a typed view for each width: an aligned access is one NumPy index."""

    def __init__(self, raw: Array, base: int = 0) -> None:
        self.base = base
        self.by_width = {width: raw.view(dtype) for width, dtype in UNSIGNED.items()}

    def load(self, address: Array, width: int, element: int) -> Array:
        return self.by_width[width][(address - self.base) // (width // 8) + element]

    def store(self, address: Array, width: int, element: int, bits: Array) -> None:
        self.by_width[width][(address - self.base) // (width // 8) + element] = bits


class Span(NamedTuple):
    start: int
    size: int
    rights: int = READABLE | WRITABLE


def span_of(array: Array, rights: int = READABLE | WRITABLE) -> Span:
    return Span(array.ctypes.data, array.nbytes, rights)


class Memory(Bank):
    """Global memory: spans of this process's memory, at their addresses. Nothing else may be touched."""

    def __init__(self, spans: Iterable[Span]) -> None:
        super().__init__(_whole_process(), FIRST)
        rights: dict[int, Span] = {}
        for span in spans:
            known = rights.get(span.start, Span(span.start, 0, 0))
            rights[span.start] = Span(span.start, max(span.size, known.size), span.rights | known.rights)
        self.spans = sorted(span for span in rights.values() if span.size)
        self.starts, self.sizes, self.rights = (np.array(values, np.int64) for values in zip(*self.spans, strict=True))
        self.places = np.cumsum(self.sizes) - self.sizes

    def check(self, address: Array, size: int, right: int) -> Array | None:
        """Which lanes may not do this; None if all may."""
        span = self._span_of(address)
        outside = (address < self.starts[span]) | (address + size > self.starts[span] + self.sizes[span])
        bad = outside | (self.rights[span] & right != right)
        return bad if bad.any() else None

    def place(self, address: Array) -> Array:
        """Returns where addresses are if the spans are put side by side."""
        span = self._span_of(address)
        return address - self.starts[span] + self.places[span]

    def _span_of(self, address: Array) -> Array:
        return np.maximum(np.searchsorted(self.starts, address, side="right") - 1, 0)


def _whole_process() -> Array:
    """Returns a view of all addresses. Most of them lead nowhere: who reads there crashes the process."""
    return np.frombuffer((ctypes.c_uint8 * (LAST - FIRST)).from_address(FIRST), np.uint8)


@dataclass
class Traffic:
    """Global loads, or global stores.

    `bytes` counts each byte once in a warp's request (a GPU serves lanes that read one address together), `sectors`
    counts the 32-byte sectors that a request touches. `requests_of_width` counts warps by the width in bits of one
    lane's access.
    """

    bytes: int = 0
    sectors: int = 0
    requests_of_width: Counter[int] = field(default_factory=Counter)

    def count(self, warp: Array, address: Array, size: int) -> None:
        """Accesses are aligned and at most a sector wide, so that each lies in one sector."""
        key = (warp << 48) | address
        if (key[1:] < key[:-1]).any():
            key = np.sort(key)
        self.bytes += _distinct(key) * size
        self.sectors += _distinct(key // SECTOR)
        self.requests_of_width[8 * size] += _distinct(key >> 48)


def _distinct(sorted_values: Array) -> int:
    return 1 + int(np.count_nonzero(sorted_values[1:] != sorted_values[:-1]))


@dataclass
class Statistics:
    loads: Traffic = field(default_factory=Traffic)
    stores: Traffic = field(default_factory=Traffic)
    warp_instructions: int = 0
    float64_instructions: int = 0  # of these, those of the unit for float64, which is narrow on most GPUs

    @property
    def bytes(self) -> int:
        return self.loads.bytes + self.stores.bytes

    @property
    def sector_bytes(self) -> int:
        return SECTOR * (self.loads.sectors + self.stores.sectors)
