"""A bucket's tensors as the Triton kernels see them: addresses in a table, uploaded only when one has changed."""

from __future__ import annotations

import torch
from torch import Tensor

from swd_fused.backends.triton.kernels.coded_segments import ROW_ALIGNMENT
from swd_fused.backends.triton.kernels.tables import CODEC, TENSOR
from swd_fused.backends.triton.launch import ALIGNMENT
from swd_fused.core.bucket import NO_GRAD, Bucket
from swd_fused.devices.transfer import from_host, int64s
from swd_fused.state.eight_bit import rows_and_columns, scales_shape
from swd_fused.state.operands import PARAM_COLUMNS, SCALE_COLUMNS

GRADS = TENSOR.grad  # the column that is only read


class Operands:
    """The kernels walk a tensor's memory from end to end, in the order in which its second moment lies there; where
    rounding is stochastic, or moments are kept in 8 bits, row by row, so that an element's number and block follow from
    its place.

    A tensor that lies in another order, or has gaps, takes part as a copy.
    """

    table: Tensor

    def __init__(self, bucket: Bucket) -> None:
        self._grads: list[int] | None = None  # their addresses
        self._aligned: Tensor | None = None  # by tensor: what is aligned is added in another order than what is not
        self.realigned: Tensor | None = None  # where `begin` has found that to be otherwise than the last time
        self._codecs: Tensor | None = None
        self._copies: list[tuple[int, int, Tensor]] = []  # of which column's which tensor. It may be the user's to free
        self._set_up(bucket, [*columns_of(bucket), *scales_of(bucket)])
        self.copies = [copy for _, _, copy in self._copies]

    def begin(self, bucket: Bucket) -> None:
        """Describes this step's gradients, if they are elsewhere than the last time, and fills the copies."""
        self.realigned = None
        if self._grads != bucket.grad_addresses:
            self._set_grads(bucket, bucket.grad_addresses)
            self._grads = bucket.grad_addresses
        if self._copies:
            columns = [*columns_of(bucket), *scales_of(bucket)]
            for column, tensor, copy in self._copies:
                copy.copy_(columns[column][tensor])

    def write_back(self, bucket: Bucket) -> None:
        """Writes to the tensors what an update wrote to their copies."""
        if not self._copies:
            return
        columns = [*columns_of(bucket), *scales_of(bucket)]
        written = [(columns[column][tensor], copy) for column, tensor, copy in self._copies if column != GRADS]
        for tensor, copy in written:
            tensor.copy_(copy)

    def _set_up(self, bucket: Bucket, columns: list[list[Tensor]]) -> None:
        """Makes the table, all but the addresses of the gradients."""
        layouts = [
            torch.empty_like(averaged, device="meta", memory_format=_walked_order(bucket, index))
            for index, averaged in enumerate(bucket.averaged)
        ]
        operands = columns_of(bucket)
        walked = [
            [_as_laid_out(tensor, layout) for tensor, layout in zip(column, layouts, strict=bool(column))]
            for column in operands
        ]
        scales = [
            [_as_laid_out(tensor, torch.empty(tensor.shape, device="meta")) for tensor in column]
            for column in scales_of(bucket)
        ]
        walked += scales
        self._copies = [
            (column, i, walked[column][i])
            for column, tensors in enumerate(columns)
            for i, tensor in enumerate(tensors)
            if walked[column][i] is not tensor
        ]
        table = torch.zeros(len(bucket.params), TENSOR.columns, dtype=torch.int64, device="cpu")
        used = [column for column, tensors in enumerate(walked[: len(operands)]) if tensors and column != GRADS]
        for column in used:
            table[:, column] = int64s(map(Tensor.data_ptr, walked[column]))
        table[:, TENSOR.group] = int64s(bucket.group_indices)
        table[:, TENSOR.number] = int64s(bucket.numbers)
        for row, numbers, param in zip(table, bucket.element_numbers, bucket.params, strict=False):
            # What takes more than one division is numbered from its first element on.
            rows = numbers.rows(param.shape) or (numbers.first, param.numel(), 0)
            row[TENSOR.first_number : TENSOR.row_pitch + 1] = int64s(rows)
        self._others_are_aligned = (table[:, used] % ALIGNMENT == 0).all(1)
        self._host_table, self._codecs = table, None
        if bucket.coded:
            self._codecs = codec_table(bucket, scales)
            for index in bucket.coded:
                self._others_are_aligned[index] &= _has_aligned_rows(bucket.params[index])

    def _set_grads(self, bucket: Bucket, addresses: list[int]) -> None:
        """Often the only ones that have changed: a backward pass puts its gradients where there is room."""
        grads = int64s(addresses)
        for column, tensor, copy in self._copies:
            if column == GRADS and addresses[tensor] != NO_GRAD:
                grads[tensor] = copy.data_ptr()
        self._host_table[:, GRADS] = grads
        # A tensor without a gradient counts as if it had one that is aligned, as gradients mostly are.
        aligned = self._others_are_aligned & ((grads % ALIGNMENT == 0) | (grads == NO_GRAD))
        if self._aligned is not None and not torch.equal(aligned, self._aligned):
            self.realigned = aligned != self._aligned
        self._host_table[:, TENSOR.aligned] = self._aligned = aligned
        if self._codecs is None:
            self.table = from_host(self._host_table, bucket.device)
        else:
            size = self._codecs.numel()
            both = from_host(torch.cat([self._codecs.flip(0).flatten(), self._host_table.flatten()]), bucket.device)
            self.table = both[size:].view(self._host_table.shape)


def columns_of(bucket: Bucket) -> list[list[Tensor]]:
    """Returns lists of tensors in the order of the table's columns. Some may be empty."""
    return [bucket.params, bucket.grads_or_params, *(getattr(bucket.state, name) for name in PARAM_COLUMNS)]


def scales_of(bucket: Bucket) -> list[list[Tensor]]:
    return [getattr(bucket.state, name) for name in SCALE_COLUMNS]


def codec_table(bucket: Bucket, scales: list[list[Tensor]]) -> Tensor:
    """Returns a row for each tensor, of zeros where it has no codes."""
    table = torch.zeros(len(bucket.params), CODEC.columns, dtype=torch.int64, device="cpu")
    for index in bucket.coded:
        shape, numbers = bucket.params[index].shape, bucket.block_numbers[index]
        for column, tensors in enumerate(scales):
            table[index, column] = tensors[index].data_ptr()
        table[index, CODEC.row_length] = rows_and_columns(shape)[1]
        table[index, CODEC.blocks_per_row] = scales_shape(shape)[-1]
        table[index, CODEC.first_block], table[index, CODEC.block_pitch] = numbers
    return table


def _walked_order(bucket: Bucket, index: int) -> torch.memory_format:
    is_rounded_at_random = bucket.options.stochastic_rounding and bucket.params[index].dtype == torch.bfloat16
    is_row_major = is_rounded_at_random or index in bucket.block_numbers
    return torch.contiguous_format if is_row_major else torch.preserve_format


def _has_aligned_rows(param: Tensor) -> bool:
    rows, columns = rows_and_columns(param.shape)
    return rows <= 1 or columns % ROW_ALIGNMENT.value == 0


def _as_laid_out(tensor: Tensor, layout: Tensor) -> Tensor:
    """The tensor itself, if its elements lie in memory as those of `layout` do, else room for a copy."""
    if all(
        stride == wanted or size == 1
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), layout.stride(), strict=True)
    ):
        return tensor
    return torch.empty_strided(layout.shape, layout.stride(), dtype=tensor.dtype, device=tensor.device)
