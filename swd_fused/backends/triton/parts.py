"""The tensors that one launch serves, cut into segments, and which program walks which of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from swd_fused.backends.triton.kernels.tables import SLOT, SUM
from swd_fused.backends.triton.launch import BLOCK
from swd_fused.devices.transfer import from_host
from swd_fused.state.eight_bit import BLOCK as CODE_BLOCK
from swd_fused.state.eight_bit import blocks_of_row

# Within a segment each thread adds in the type that computes, so it must not be too long. What the threads read about a
# segment, 37 KB, is 0.4% of what they update in one of this length.
MAX_SEGMENT = 512 * BLOCK

# What a segment costs besides its elements, in elements: keeps the programs' shares even among small tensors.
SEGMENT_COST = 2 * BLOCK

ALIGNMENT = 16

EMPTY: Mapping[int, int] = MappingProxyType({})


class Segment(NamedTuple):
    tensor: int
    start: int
    length: int


def segments_of(
    numels: Mapping[int, int], programs: int, columns: Mapping[int, int] = EMPTY
) -> tuple[list[Segment], list[int]]:
    """Tensors, by number, cut into segments; and for each program its first segment, with the end of the last's.

    Each program has an equal share of the cost. Cuts are at multiples of BLOCK, so that a tensor that is aligned at its
    beginning is so in each segment. Tensors whose moments are kept in 8 bits, which have `columns`, are cut between
    blocks of codes; a block that ends with its row costs as much as a whole one.
    """
    padded = {tensor: _padded(numel, columns.get(tensor)) for tensor, numel in numels.items()}
    segments, first_of_programs = _equal_segments(padded, programs)
    if columns:
        segments = [_unpadded(segment, columns.get(segment.tensor)) for segment in segments]
    return segments, first_of_programs


def _padded(numel: int, columns: int | None) -> int:
    """Returns the elements of a tensor with whole blocks of codes."""
    return numel if not columns else numel // columns * blocks_of_row(columns) * CODE_BLOCK


def _unpadded(segment: Segment, columns: int | None) -> Segment:
    if columns is None:
        return segment
    per_row = blocks_of_row(columns)
    ends = (place // CODE_BLOCK for place in (segment.start, segment.start + segment.length))
    start, end = (block // per_row * columns + block % per_row * CODE_BLOCK for block in ends)
    return Segment(segment.tensor, start, end - start)


def _equal_segments(numels: Mapping[int, int], programs: int) -> tuple[list[Segment], list[int]]:
    total = sum(numel + SEGMENT_COST for numel in numels.values())
    segments, owners, position = [], [], 0
    for tensor, numel in numels.items():
        start = 0
        while start < numel:
            program = (position + start) * programs // total
            next_share = -(-(program + 1) * total // programs) - position
            count = min(numel - start, MAX_SEGMENT, -(-(next_share - start) // BLOCK) * BLOCK)
            segments.append(Segment(tensor, start, count))
            owners.append(program)
            start += count
        position += numel + SEGMENT_COST
    return segments, [bisect_left(owners, program) for program in range(programs + 1)]


class Dtypes(NamedTuple):
    """The combination of dtypes that a kernel is compiled for."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    averaged: torch.dtype  # of max_exp_avg_sq with amsgrad, else of exp_avg_sq itself
    weight: torch.dtype  # of what is updated: masters, their remainders in int16, or parameters themselves

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.averaged, torch.float32)

    @property
    def vector(self) -> int:
        """Elements of the widest operand in 128 bits. Narrower ones then come in 64 or 32 bits, but each access of a
        warp is one stretch of memory; 128 bits of all would leave gaps in the wide ones' accesses."""
        return ALIGNMENT // max(dtype.itemsize for dtype in self)


class Part:
    """The tensors of a bucket that have one combination of dtypes: what one launch serves."""

    def __init__(
        self,
        dtypes: Dtypes,
        numels: Mapping[int, int],
        programs: int,
        device: torch.device,
        columns: Mapping[int, int] = EMPTY,
    ) -> None:
        self.dtypes = dtypes
        self.coded = bool(columns)
        blocks = sum(-(-numel // BLOCK) for numel in numels.values())
        self.programs = max(1, min(programs, blocks))
        segments, program_segments = segments_of(numels, self.programs, columns)
        self.n_segments = len(segments)
        rows = torch.tensor(segments, dtype=torch.int64, device="cpu").reshape(-1, len(Segment._fields))
        self.segments = from_host(rows, device)
        self.program_segments = from_host(torch.tensor(program_segments, dtype=torch.int32, device="cpu"), device)
        # -1 is no step count: nothing is known yet.
        self.sums = torch.full((max(1, self.n_segments), SUM.columns), -1.0, dtype=torch.float64, device=device)
        self.slots = torch.zeros(self.programs, SLOT.columns, dtype=torch.float64, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.launchers: dict[tuple[Any, bool], Any] = {}  # by kernel, and whether it sums gradients
