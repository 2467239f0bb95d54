"""A bucket's tensors as the Triton kernels see them: addresses in a table, uploaded only when one has changed."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from swd_fused.backends.address_table import NO_GRAD, Fingerprint, check_memory, fingerprint, int64s
from swd_fused.backends.triton.kernels.tables import (
    ALIGNED,
    FIRST_NUMBER,
    GRAD_ADDRESS,
    GROUP,
    ROW_PITCH,
    TENSOR_COLUMNS,
    TENSOR_ID,
)
from swd_fused.backends.triton.parts import ALIGNMENT
from swd_fused.bucket import Bucket
from swd_fused.transfer import from_host

GRADS = GRAD_ADDRESS.value  # the column that is only read


class Operands:
    """The kernels walk a tensor's memory from end to end, in the order in which its second moment lies there; where
    rounding is stochastic row by row, so that an element's number follows from its place.

    A tensor that lies in another order, or has gaps, takes part as a copy.
    """

    table: Tensor

    def __init__(self) -> None:
        self._seen = Fingerprint([], [])
        self._dtypes: list[torch.dtype] = []
        self._copies: list[tuple[int, int, Tensor]] = []  # of which column's which tensor. It may be the user's to free

    def refresh(self, bucket: Bucket) -> bool:
        """Describes the tensors of a step. Returns whether their dtypes differ from those that were seen last."""
        columns = columns_of(bucket)
        seen, before = fingerprint(bucket), self._dtypes
        if self._seen != seen:
            is_new, self._seen = self._seen.others != seen.others, Fingerprint([], [])
            if is_new:
                check_memory(bucket)
                self._set_up(bucket, columns)
                self._dtypes = [tensor.dtype for tensor in chain.from_iterable(columns)]
            self._set_grads(bucket, seen.grads)
            self._seen = seen
        for column, tensor, copy in self._copies:
            copy.copy_(columns[column][tensor])
        return before != self._dtypes

    def write_back(self, bucket: Bucket) -> None:
        """Writes to the tensors what an update wrote to their copies."""
        columns = columns_of(bucket)
        written = [(columns[column][tensor], copy) for column, tensor, copy in self._copies if column != GRADS]
        for tensor, copy in written:
            tensor.copy_(copy)
        if written:
            bucket.note_versions()

    def _set_up(self, bucket: Bucket, columns: list[list[Tensor]]) -> None:
        """Makes the table, all but the addresses of the gradients."""
        layouts = [
            torch.empty_like(averaged, device="meta", memory_format=_walked_order(bucket, param))
            for averaged, param in zip(bucket.averaged, bucket.params, strict=True)
        ]
        walked = [
            [_as_laid_out(tensor, layout) for tensor, layout in zip(column, layouts, strict=bool(column))]
            for column in columns
        ]
        self._copies = [
            (column, i, walked[column][i])
            for column, tensors in enumerate(columns)
            for i, tensor in enumerate(tensors)
            if walked[column][i] is not tensor
        ]
        table = torch.zeros(len(bucket.params), TENSOR_COLUMNS.value, dtype=torch.int64, device="cpu")
        used = [column for column, tensors in enumerate(walked) if tensors and column != GRADS]
        for column in used:
            table[:, column] = int64s(map(Tensor.data_ptr, walked[column]))
        table[:, GROUP.value] = int64s(bucket.group_indices)
        table[:, TENSOR_ID.value] = int64s(bucket.numbers)
        for row, numbers, param in zip(table, bucket.element_numbers, bucket.params, strict=False):
            # What takes more than one division is numbered from its first element on.
            rows = numbers.rows(param.shape) or (numbers.first, param.numel(), 0)
            row[FIRST_NUMBER.value : ROW_PITCH.value + 1] = int64s(rows)
        self._others_are_aligned = (table[:, used] % ALIGNMENT == 0).all(1)
        self._host_table = table

    def _set_grads(self, bucket: Bucket, addresses: list[int]) -> None:
        """Often the only ones that have changed: a backward pass puts its gradients where there is room."""
        grads = int64s(addresses)
        if 0 in addresses:
            check_memory(bucket)
        for column, tensor, copy in self._copies:
            if column == GRADS and addresses[tensor] != NO_GRAD:
                grads[tensor] = copy.data_ptr()
        self._host_table[:, GRADS] = grads
        self._host_table[:, ALIGNED.value] = self._others_are_aligned & (grads % ALIGNMENT == 0)
        self.table = from_host(self._host_table, bucket.device)


def columns_of(bucket: Bucket) -> list[list[Tensor]]:
    """Returns lists of tensors in the order of the table's columns. The last two may be empty."""
    moments = bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs
    return [bucket.params, bucket.grads_or_params, *moments, bucket.masters]


def _walked_order(bucket: Bucket, param: Tensor) -> torch.memory_format:
    is_rounded_at_random = bucket.options.stochastic_rounding and param.dtype == torch.bfloat16
    return torch.contiguous_format if is_rounded_at_random else torch.preserve_format


def _as_laid_out(tensor: Tensor, layout: Tensor) -> Tensor:
    """The tensor itself, if its elements lie in memory as those of `layout` do, else room for a copy."""
    if all(
        stride == wanted or size == 1
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), layout.stride(), strict=True)
    ):
        return tensor
    return torch.empty_strided(layout.shape, layout.stride(), dtype=tensor.dtype, device=tensor.device)
