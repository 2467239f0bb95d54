"""The Triton backend's plan of a bucket, kept from step to step: a table of tensors, and the segments of each program.

The kernels walk a tensor's memory from end to end, in the order of its second moment's memory. With stochastic rounding
or 8-bit moments they walk it row by row, so that an element's number and block follow from its place. A tensor whose
memory has another order, or gaps, is replaced by a copy.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.kernels.eight_bit import ROW_ALIGNMENT
from swd_fused.backends.triton.kernels.tables import SEGMENT, SLOT, SUM, TENSOR
from swd_fused.backends.triton.launch import ALIGNMENT, BLOCK, Variant, launcher_for, programs_on
from swd_fused.core import backend
from swd_fused.core.bucket import NO_GRAD, Bucket
from swd_fused.devices import graphs
from swd_fused.devices.transfer import from_host, int64s
from swd_fused.state.eight_bit import BLOCK as CODE_BLOCK
from swd_fused.state.eight_bit import CODE_DTYPES, blocks_of_row, rows_and_columns
from swd_fused.state.rounding import rounding_start
from swd_fused.state.storage import PARAM_COLUMNS, SCALE_COLUMNS

CODED_DTYPES = tuple(CODE_DTYPES.values())

# Within a segment each thread adds in the dtype of the computation, so a segment must not be too long. Threads read
# 37 KB about a segment, 0.4% of the memory that they update in one of this length.
MAX_SEGMENT = 512 * BLOCK

# The overhead of a segment, in elements: counting it keeps the programs' shares even among small tensors.
SEGMENT_COST = 2 * BLOCK


class Segment(NamedTuple):
    tensor: int
    start: int
    length: int


def segments_of(
    numels: Mapping[int, int], programs: int, columns: Mapping[int, int]
) -> tuple[list[Segment], list[int]]:
    """Cuts tensors into segments. Returns these, and each program's first segment followed by the number of segments.

    Each program has an equal share of the cost. Cuts are at multiples of BLOCK, so if a tensor's beginning is aligned,
    each segment's is too. Tensors whose moments are kept in 8 bits, which have `columns`, are cut between blocks of
    codes; a block that ends with its row costs as much as a whole one.
    """
    padded = {  # sizes after filling rows up to whole blocks of codes
        tensor: numel // columns[tensor] * blocks_of_row(columns[tensor]) * CODE_BLOCK if columns.get(tensor) else numel
        for tensor, numel in numels.items()
    }
    total = sum(numel + SEGMENT_COST for numel in padded.values())
    segments, owners, position = [], [], 0
    for tensor, numel in padded.items():
        start = 0
        while start < numel:
            program = (position + start) * programs // total
            next_share = -(-(program + 1) * total // programs) - position
            end = min(numel, start + MAX_SEGMENT, start + -(-(next_share - start) // BLOCK) * BLOCK)
            first, last = (_unpadded(place, columns.get(tensor)) for place in (start, end))
            segments.append(Segment(tensor, first, last - first))
            owners.append(program)
            start = end
        position += numel + SEGMENT_COST
    return segments, [bisect_left(owners, program) for program in range(programs + 1)]


def _unpadded(place: int, columns: int | None) -> int:
    """Returns the element at a place that counts each block of codes as a whole one."""
    if not columns:
        return place
    row, block = divmod(place // CODE_BLOCK, blocks_of_row(columns))
    return row * columns + block * CODE_BLOCK


# --- Tensors in a table


def columns_of(bucket: Bucket) -> list[list[Tensor]]:
    """Returns lists of tensors in the order of the table's columns. Some may be empty."""
    return [bucket.params, *(getattr(bucket.state, name) for name in (*PARAM_COLUMNS, *SCALE_COLUMNS))]


def walked_layouts(bucket: Bucket) -> list[Tensor]:
    """Returns for each tensor a meta tensor whose strides give the order in which its memory is walked."""
    stochastic, layouts = bucket.options.stochastic_rounding, []
    for index, (param, averaged) in enumerate(zip(bucket.params, bucket.averaged, strict=True)):
        is_row_major = index in bucket.block_numbers or (stochastic and param.dtype == torch.bfloat16)
        order = torch.contiguous_format if is_row_major else torch.preserve_format
        layouts.append(torch.empty_like(averaged, device="meta", memory_format=order))
    return layouts


def walkable(tensor: Tensor, layout: Tensor) -> Tensor:
    """Returns the tensor itself if its elements are laid out in memory as in `layout`, else memory for a copy."""
    if tensor.stride() == layout.stride() or all(
        stride == wanted or size == 1
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), layout.stride(), strict=True)
    ):
        return tensor
    return torch.empty_strided(layout.shape, layout.stride(), dtype=tensor.dtype, device=tensor.device)


def table_of(bucket: Bucket, columns: list[list[Tensor]]) -> Tensor:
    """Returns a row for each tensor, see `kernels.tables.TENSOR`."""
    table = torch.zeros(len(bucket.params), TENSOR.columns, dtype=torch.int64, device="cpu")
    for column, tensors in enumerate(columns):
        if tensors:
            table[:, column] = int64s(map(Tensor.data_ptr, tensors))
    table[:, TENSOR.aligned] = (table[:, : 1 + len(PARAM_COLUMNS)] % ALIGNMENT == 0).all(1)
    table[:, TENSOR.group] = int64s(bucket.group_indices)
    table[:, TENSOR.number] = int64s(bucket.numbers)
    for row, numbers, param in zip(table, bucket.element_numbers, bucket.params, strict=False):
        # A tensor whose numbers need more than one division counts them from its first element on.
        rows = numbers.rows(param.shape) or (numbers.first, param.numel(), 0)
        row[TENSOR.first_number : TENSOR.row_pitch + 1] = int64s(rows)
    for index in bucket.coded:
        n_rows, length = rows_and_columns(bucket.params[index].shape)
        codes = length, blocks_of_row(length), *bucket.block_numbers[index]
        table[index, TENSOR.code_row_length : TENSOR.block_pitch + 1] = int64s(codes)
        table[index, TENSOR.aligned] &= n_rows <= 1 or length % ROW_ALIGNMENT.value == 0
    return table


# --- Launches


class Part:
    """The tensors of a bucket that share a combination of dtypes, and so a launch."""

    def __init__(
        self,
        variant: Variant,
        numels: Mapping[int, int],
        columns: Mapping[int, int],
        programs: int,
        device: torch.device,
    ) -> None:
        self.variant = variant
        self.programs = max(1, min(programs, sum(-(-numel // BLOCK) for numel in numels.values())))
        segments, program_segments = segments_of(numels, self.programs, columns)
        self.n_segments = len(segments)
        self.segments = from_host(int64s(chain.from_iterable(segments)).view(-1, len(Segment._fields)), device)
        self.program_segments = from_host(torch.tensor(program_segments, dtype=torch.int32, device="cpu"), device)
        # No tensor has the step count -1: it marks sums that must be computed.
        self.sums = torch.full((max(1, self.n_segments), SUM.columns), -1.0, dtype=torch.float64, device=device)
        self.slots = torch.zeros(self.programs, SLOT.columns, dtype=torch.float64, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.launchers: dict[tuple[str, bool], Any] = {}  # by kernel, and whether it sums gradients


# Passes that are launched separately share one grid, since they share their sums. It is the lagged step's: in a lagged
# run the first step, the first after a resume, and each that releases gradients are taken in separate passes. Another
# grid would cut tensors elsewhere, and the mean would differ in the last bits.
PASSES = kernels.lagged_step_kernel


class Plan(backend.Plan):
    """Holds the operands, the parts with the sums of their second moments, and small tensors on the device."""

    grads: Tensor  # the addresses of the gradients, on the device

    def __init__(self, bucket: Bucket) -> None:
        self.one, self.zero = (torch.full((), x, dtype=torch.float64, device=bucket.device) for x in (1.0, 0.0))
        self.no_scale, self.no_inf = self.one.float(), self.zero.float()  # float32, as GradScaler's
        self.last: Tensor | None = None  # the `last` that lagged_step_kernel has left, if it took the last step
        self.corrections_of_last: list[tuple[float, float]] = []  # beta2 and corrects_bias of each group for `last`
        self._limits: dict[tuple[float | None, int], Tensor] = {}
        self._columns = {tensor: rows_and_columns(bucket.params[tensor].shape)[1] for tensor in bucket.coded}
        self._numels = _numels_by_dtypes(bucket)
        self.n_parts = len(self._numels)
        self._parts: dict[Any, list[Part]] = {}  # by kernel
        self._with_sums: list[Part] | None = None  # the parts whose `sums` are up to date
        self._addresses: list[int] = []
        self._misaligned: Tensor | None = None  # the last bits of addresses
        layouts, columns = walked_layouts(bucket), columns_of(bucket)
        layouts_of_scales = [torch.empty(scale.shape, device="meta") for scale in columns[-1]]
        walked = [
            list(map(walkable, tensors, layouts_of_scales if column > len(PARAM_COLUMNS) else layouts))
            for column, tensors in enumerate(columns)
        ]
        pairs = zip(chain.from_iterable(columns), chain.from_iterable(walked), strict=True)
        self._copied = [(tensor, copy) for tensor, copy in pairs if copy is not tensor]
        grads = bucket.grads_or_params
        grad_copies = map(walkable, grads, layouts)
        self._grad_copies = {i: copy for i, copy in enumerate(grad_copies) if copy is not grads[i]}
        self.copies = [*self._grad_copies.values(), *(copy for _, copy in self._copied)]
        self._table = from_host(table_of(bucket, walked), bucket.device)

    def for_capture(self) -> Plan:
        """Returns a copy for a step that is captured in a CUDA graph. Both share present parts, but not later ones."""
        captured = copy.copy(self)
        captured._limits, captured._parts = self._limits.copy(), self._parts.copy()
        captured._forget_sums()
        return captured

    def begin(self, bucket: Bucket) -> None:
        """Takes up a step's gradients, and fills the copies of tensors that kernels cannot walk."""
        if self._addresses != bucket.grad_addresses:
            self._set_grads(bucket)
        for index, grad_copy in self._grad_copies.items():
            grad = bucket.grads[index]
            if grad is not None:
                grad_copy.copy_(grad)
        for tensor, walked in self._copied:
            walked.copy_(tensor)
        if graphs.any_are_shared() and bucket.is_stepped_by_graphs():
            self._forget_sums()

    def end(self, bucket: Bucket) -> None:
        """Writes copies back and counts the writes, after an update."""
        bucket.sums = None  # kept here, by segment
        for tensor, walked in self._copied:
            tensor.copy_(walked)
        bucket.count_writes()

    def _set_grads(self, bucket: Bucket) -> None:
        """Uploads the addresses of gradients, which may differ after each backward pass."""
        self._addresses = bucket.grad_addresses
        addresses = int64s(self._addresses)
        for index, grad_copy in self._grad_copies.items():
            if addresses[index] != NO_GRAD:
                addresses[index] = grad_copy.data_ptr()
        misaligned = addresses & (ALIGNMENT - 1)
        if self._misaligned is not None and not torch.equal(misaligned, self._misaligned):
            # Alignment changes the order of additions. So sums are computed anew, in the order in which a run that is
            # resumed now would compute them.
            for part in chain.from_iterable(self._parts.values()):
                part.sums[:, SUM.step].fill_(-1.0)
            self._forget_sums()
        self._misaligned = misaligned
        self.grads = from_host(addresses, bucket.device)

    def _forget_sums(self) -> None:
        self._with_sums = self.last = None

    def parts_for(self, kernel: Any, bucket: Bucket) -> list[Part]:
        """Returns the parts with a grid that suits this kernel, and with `sums` up to date.

        Each grid cuts tensors into its own segments, so that all programs have equal shares. If the last step used
        another grid, or perhaps a graph, the sums of segments that are out of date are computed from memory.
        """
        parts = self._parts.get(kernel)
        if parts is None:
            parts = self._parts[kernel] = [self._new_part(kernel, bucket, *group) for group in self._numels]
        if parts is not self._with_sums:
            for part in parts:
                self.launch(kernels.stored_sums_kernel, bucket, part, {})
            self._with_sums, self.last = parts, None
        return parts

    def _new_part(self, kernel: Any, bucket: Bucket, dtypes: Variant, numels: dict[int, int]) -> Part:
        columns = {tensor: self._columns[tensor] for tensor in numels if tensor in self._columns}
        options = bucket.options
        variant = dtypes._replace(
            amsgrad=bucket.amsgrad,
            master=bool(bucket.state.masters),
            stochastic=options.stochastic_rounding and dtypes.param == torch.bfloat16,
            adds_l2=options.decay == "l2",
            coded=bool(columns),
            cautious=any(row.cautious for row in bucket.hyper.rows),
            averages=bool(bucket.state.ema_params),
        )
        return Part(variant, numels, columns, programs_on(kernel, bucket.device, variant), bucket.device)

    def launch(
        self, kernel: Any, bucket: Bucket, part: Part, others: Mapping[str, Tensor], sum_grads: bool = False
    ) -> None:
        """Launches a kernel with arguments by the names of its parameters: the plan's own tensors, and `others`."""
        launcher = part.launchers.get((kernel.__name__, sum_grads))
        if launcher is None:
            launcher = launcher_for(kernel, bucket.device, part.variant, sum_grads)
            part.launchers[kernel.__name__, sum_grads] = launcher
        given: dict[str, Tensor | int] = {
            "sums": part.sums,
            "slots": part.slots,
            "counter": part.counter,
            "steps": bucket.steps,
            "tensors": self._table,
            "grads": self.grads,
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
        """Launches a pass for each part. Returns each part's row of totals, with the columns of `slots`."""
        totals = torch.empty(self.n_parts, SLOT.columns, dtype=torch.float64, device=bucket.device)
        for part, row in zip(self.parts_for(PASSES, bucket), totals, strict=True):
            self.launch(kernel, bucket, part, {"totals": row, **others}, sum_grads)
        return totals

    def sums_by_tensor(self, bucket: Bucket) -> Tensor:
        """Returns each tensor's sum of second moments as the last step left it, whichever grid that used."""
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
            bound = math.inf if max_grad_norm is None else max_grad_norm
            skips, start = bucket.options.skip_nonfinite, rounding_start(bucket.options.seed)
            limits = torch.tensor([max(1, bucket.numel), bound, skips, start], dtype=torch.float64, device="cpu")
            self._limits[key] = from_host(limits, bucket.device)
        return self._limits[key]


def _numels_by_dtypes(bucket: Bucket) -> list[tuple[Variant, dict[int, int]]]:
    """Groups tensors by dtypes. Codes count as float32, in which they are computed, so both share a launch."""
    numels: defaultdict[Variant, dict[int, int]] = defaultdict(dict)
    moments = bucket.state.exp_avgs, bucket.state.exp_avg_sqs, bucket.averaged
    operands = bucket.params, bucket.grads_or_params, *moments, bucket.state.masters or bucket.params
    for tensor, row in enumerate(zip(*operands, strict=True)):
        dtypes: Any = (torch.float32 if each.dtype in CODED_DTYPES else each.dtype for each in row)
        numels[Variant(*dtypes)][tensor] = row[0].numel()
    return list(numels.items())
