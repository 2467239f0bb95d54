"""The Triton backend's plan of a bucket, kept from step to step."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from swd_fused.backends.triton.compilation import launcher_for, programs_on, variant_of
from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.kernels.tables import SEGMENT, SLOT, SUM
from swd_fused.backends.triton.operands import Operands
from swd_fused.backends.triton.parts import Dtypes, Part
from swd_fused.core.bucket import Bucket
from swd_fused.devices import graphs
from swd_fused.devices.transfer import from_host
from swd_fused.state.eight_bit import CODE_DTYPES, rows_and_columns
from swd_fused.state.rounding import rounding_start

CODED_DTYPES = tuple(CODE_DTYPES.values())


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
                self.launch(kernels.stored_sums_kernel, bucket, part, [part.sums])
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
        self,
        kernel: Any,
        bucket: Bucket,
        part: Part,
        written: Sequence[Tensor],
        *others: Tensor | int,
        sum_grads: bool = False,
    ) -> None:
        """Launches a kernel with its first arguments, the tables that all kernels read, and its last arguments."""
        launcher = part.launchers.get((kernel, sum_grads))
        if launcher is None:
            variant = variant_of(bucket, part.dtypes, part.coded)
            launcher = launcher_for(kernel, bucket.device, part.dtypes, variant, sum_grads)
            part.launchers[kernel, sum_grads] = launcher
        tables = bucket.steps, self.table, part.segments, part.program_segments, bucket.hyper.table
        programs = 1 if kernel is kernels.last_exp_avg_sq_sum_kernel else part.programs
        launcher(programs, *written, *tables, *others)

    def new_totals(self, bucket: Bucket) -> Tensor:
        """A row for each part, with the columns of `slots`."""
        return torch.empty(self.n_parts, SLOT.columns, dtype=torch.float64, device=bucket.device)

    def find_last(self, bucket: Bucket, part: Part, last: Tensor) -> None:
        self.launch(kernels.last_exp_avg_sq_sum_kernel, bucket, part, [last, part.sums], part.n_segments)

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
