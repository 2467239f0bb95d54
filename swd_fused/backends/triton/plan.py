"""The Triton backend's plan of a bucket, kept from step to step: segments of tensors, and which program walks which."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.kernels.tables import SEGMENT, SLOT, SUM
from swd_fused.backends.triton.launch import BLOCK, Dtypes, launcher_for, programs_on, variant_of
from swd_fused.backends.triton.operands import Operands
from swd_fused.core.bucket import Bucket
from swd_fused.devices import graphs
from swd_fused.devices.transfer import from_host
from swd_fused.state.eight_bit import BLOCK as CODE_BLOCK
from swd_fused.state.eight_bit import CODE_DTYPES, blocks_of_row, rows_and_columns
from swd_fused.state.rounding import rounding_start

CODED_DTYPES = tuple(CODE_DTYPES.values())

# Within a segment each thread adds in the type that computes, so it must not be too long. What the threads read about a
# segment, 37 KB, is 0.4% of what they update in one of this length.
MAX_SEGMENT = 512 * BLOCK

# What a segment costs besides its elements, in elements: keeps the programs' shares even among small tensors.
SEGMENT_COST = 2 * BLOCK

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


# Passes that are launched by themselves share one grid, since they share their sums. It is that of the lagged step: in
# a lagged run the first step, the first after a resume, and each that releases gradients are taken in passes. On
# another grid tensors would be cut elsewhere, and the mean would have other last bits.
PASSES = kernels.lagged_step_kernel


class Plan:
    """The operands; the parts, with the sums of their second moments; and small tensors that live on the device."""

    def __init__(self, bucket: Bucket) -> None:
        self.one, self.zero = (torch.full((), x, dtype=torch.float64, device=bucket.device) for x in (1.0, 0.0))
        self.no_scale, self.no_inf = self.one.float(), self.zero.float()  # as GradScaler has them
        self.last: Tensor | None = None  # what lagged_step_kernel finds, if it was that kernel's turn the last time
        self.corrections_of_last: list[tuple[float, float]] = []  # beta2 and corrects_bias by group
        self._operands = Operands(bucket)
        self.copies = self._operands.copies
        self._limits: dict[tuple[float | None, int], Tensor] = {}
        self._numels = _numels_by_dtypes(bucket)
        self.n_parts = len(self._numels)
        self.table: Tensor
        self._columns = _columns_of_coded(bucket)
        self._parts: dict[Any, list[Part]] = {}
        self._with_sums: list[Part] | None = None  # of these `sums` is up to date

    def for_capture(self) -> Plan:
        """Returns a copy for a step that is captured in a CUDA graph. Both use the same parts, and may replace them."""
        captured = copy.copy(self)
        captured._operands = copy.copy(self._operands)
        captured._limits, captured._parts = self._limits.copy(), self._parts.copy()
        captured._forget_sums()
        return captured

    def begin(self, bucket: Bucket) -> None:
        """Takes up the gradients of a step."""
        self._operands.begin(bucket)
        self.table = self._operands.table
        if self._operands.realigned is not None:
            self._forget_sums_of(from_host(self._operands.realigned, bucket.device))
        if graphs.any_are_shared() and bucket.is_stepped_by_graphs():
            self._forget_sums()

    def end(self, bucket: Bucket) -> None:
        """Writes copies back and counts the writes, after an update."""
        bucket.sums = None  # kept here, by segment
        self._operands.write_back(bucket)
        bucket.count_writes()

    def parts_for(self, kernel: Any, bucket: Bucket) -> list[Part]:
        """Returns the parts with a grid that suits this kernel, and with `sums` up to date.

        Each grid cuts tensors into segments of its own, so that all programs have equal shares. Where another one took
        the last step, or perhaps a graph, the segments that are out of date are read once more.
        """
        if kernel not in self._parts:
            self._parts[kernel] = [
                self._new_part(kernel, bucket, dtypes, numels) for dtypes, numels in self._numels.items()
            ]
        parts = self._parts[kernel]
        if parts is not self._with_sums:
            for part in parts:
                self.launch(kernels.stored_sums_kernel, bucket, part, {})
            self._with_sums, self.last = parts, None
        return parts

    def _new_part(self, kernel: Any, bucket: Bucket, dtypes: Dtypes, numels: dict[int, int]) -> Part:
        columns = {tensor: self._columns[tensor] for tensor in numels if tensor in self._columns}
        programs = programs_on(kernel, bucket.device, dtypes, variant_of(bucket, dtypes, bool(columns)))
        return Part(dtypes, numels, programs, bucket.device, columns)

    def _forget_sums_of(self, tensors: Tensor) -> None:
        """Has these read once more, in the order in which a run that is resumed now reads them."""
        for part in chain.from_iterable(self._parts.values()):
            known = part.sums[: part.n_segments, SUM.step]
            known.masked_fill_(tensors[part.segments[:, SEGMENT.tensor]], -1.0)
        self._forget_sums()

    def _forget_sums(self) -> None:
        self._with_sums = self.last = None

    def launch(
        self, kernel: Any, bucket: Bucket, part: Part, others: Mapping[str, Tensor], sum_grads: bool = False
    ) -> None:
        """Launches a kernel with what it asks for by the names of its parameters: `others` are not the plan's own."""
        launcher = part.launchers.get((kernel, sum_grads))
        if launcher is None:
            variant = variant_of(bucket, part.dtypes, part.coded)
            launcher = launcher_for(kernel, bucket.device, part.dtypes, variant, sum_grads)
            part.launchers[kernel, sum_grads] = launcher
        given: dict[str, Tensor | int] = {
            "sums": part.sums,
            "slots": part.slots,
            "counter": part.counter,
            "steps": bucket.steps,
            "tensors": self.table,
            "segments": part.segments,
            "program_segments": part.program_segments,
            "hyper": bucket.hyper.table,
            "n_tensors": len(bucket.params),
            "n_segments": part.n_segments,
            **others,
        }
        programs = 1 if kernel is kernels.last_exp_avg_sq_sum_kernel else part.programs
        launcher(programs, *map(given.__getitem__, launcher.arguments))

    def launch_all(self, kernel: Any, bucket: Bucket, others: Mapping[str, Tensor], sum_grads: bool = False) -> Tensor:
        """Launches a pass for each part. Returns a row of totals for each, with the columns of `slots`."""
        totals = torch.empty(self.n_parts, SLOT.columns, dtype=torch.float64, device=bucket.device)
        for part, row in zip(self.parts_for(PASSES, bucket), totals, strict=True):
            self.launch(kernel, bucket, part, {"totals": row, **others}, sum_grads)
        return totals

    def sums_by_tensor(self, bucket: Bucket) -> Tensor:
        """Returns the sums of second moments by tensor: what the last step left, whichever grid it had."""
        if bucket.is_stepped_by_graphs():
            self._forget_sums()
        parts = self._with_sums or self.parts_for(next(reversed(self._parts), PASSES), bucket)
        sums = torch.zeros(len(bucket.params), dtype=torch.float64, device=bucket.device)
        for part in parts:
            sums.index_add_(0, part.segments[:, SEGMENT.tensor], part.sums[: part.n_segments, SUM.total])
        return sums

    def find_last(self, bucket: Bucket, part: Part, last: Tensor) -> None:
        self.launch(kernels.last_exp_avg_sq_sum_kernel, bucket, part, {"last": last})

    def limits(self, bucket: Bucket, max_grad_norm: float | None = None) -> Tensor:
        key = max_grad_norm, bucket.numel
        if key not in self._limits:
            options = bucket.options
            values = [
                max(1, bucket.numel),
                math.inf if max_grad_norm is None else max_grad_norm,
                options.skip_nonfinite,
                rounding_start(options.seed),
            ]
            limits = torch.tensor(values, dtype=torch.float64, device="cpu")
            self._limits[key] = from_host(limits, bucket.device)
        return self._limits[key]


def _columns_of_coded(bucket: Bucket) -> dict[int, int]:
    return {tensor: rows_and_columns(bucket.params[tensor].shape)[1] for tensor in bucket.coded}


def _numels_by_dtypes(bucket: Bucket) -> dict[Dtypes, dict[int, int]]:
    """Codes count as float32, which they are computed in: so they share a launch with moments in float32."""
    numels: defaultdict[Dtypes, dict[int, int]] = defaultdict(dict)
    moments = bucket.state.exp_avgs, bucket.state.exp_avg_sqs, bucket.averaged
    operands = bucket.params, bucket.grads_or_params, *moments, bucket.state.masters or bucket.params
    for tensor, (param, *others) in enumerate(zip(*operands, strict=True)):
        dtypes = (torch.float32 if other.dtype in CODED_DTYPES else other.dtype for other in others)
        numels[Dtypes(param.dtype, *dtypes)][tensor] = param.numel()
    return numels
