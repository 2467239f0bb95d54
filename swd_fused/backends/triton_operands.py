"""A bucket's tensors as the Triton kernels see them: addresses in a table, uploaded only when one has changed."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from swd_fused.backends.triton_parts import ALIGNMENT, upload
from swd_fused.bucket import Bucket
from swd_fused.triton_kernels.tables import ALIGNED, GRAD_ADDRESS, GROUP, TENSOR_COLUMNS, TENSOR_ID

GRADS = GRAD_ADDRESS.value  # the column that is only read


class Operands:
    """The kernels walk a tensor's memory from end to end, in the order in which its second moment lies there.

    A tensor that lies in another order, or has gaps, takes part as a copy.
    """

    table: Tensor

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._written_copies: list[tuple[Tensor, Tensor]] = []

    def refresh(self, bucket: Bucket) -> bool:
        """Before each step. Whether there are other dtypes than those that were seen last."""
        columns = [
            *(bucket.params, bucket.grads, bucket.exp_avgs, bucket.exp_avg_sqs),
            *(bucket.max_exp_avg_sqs, bucket.masters),
        ]
        tensors = list(chain.from_iterable(columns))
        dtypes = [tensor.dtype for tensor in tensors]
        try:
            seen = [dtypes, list(map(Tensor.stride, tensors)), list(map(Tensor.data_ptr, tensors))]
            seen.append(list(map(Tensor.is_neg, bucket.grads)))
        except RuntimeError:  # a sparse gradient, which `check` refuses in our words
            bucket.check()
            raise
        before, self._seen = self._seen, []
        if before != seen:
            bucket.check()
            self._set_up(bucket, columns)
        for copy, tensor in self._copies:
            copy.copy_(tensor)
        self._seen = seen
        return not before or before[0] != dtypes

    def write_back(self, bucket: Bucket) -> None:
        """After an update, what it wrote to copies."""
        for copy, tensor in self._written_copies:
            tensor.copy_(copy)
        if self._written_copies:
            bucket.note_versions()

    def _set_up(self, bucket: Bucket, columns: list[list[Tensor]]) -> None:
        layouts = [torch.empty_like(tensor, device="meta") for tensor in bucket.averaged]
        walked = [
            [_as_laid_out(tensor, layout) for tensor, layout in zip(column, layouts, strict=bool(column))]
            for column in columns
        ]
        pairs = [
            [(copy, tensor) for copy, tensor in zip(*both, strict=True) if copy is not tensor]
            for both in zip(walked, columns, strict=True)
        ]
        self._copies = list(chain(*pairs))
        self._written_copies = list(chain(*pairs[:GRADS], *pairs[GRADS + 1 :]))
        table = torch.zeros(len(bucket.params), TENSOR_COLUMNS.value, dtype=torch.int64, device="cpu")
        used = [column for column, tensors in enumerate(walked) if tensors]
        for column in used:
            table[:, column] = torch.frombuffer(array("q", map(Tensor.data_ptr, walked[column])), dtype=torch.int64)
        addresses = table[:, used]
        if ((addresses == 0) & (torch.tensor([[param.numel()] for param in bucket.params], device="cpu") > 0)).any():
            raise RuntimeError("FusedAdamS got a tensor that has elements, but whose memory was freed.")
        table[:, ALIGNED.value] = (addresses % ALIGNMENT == 0).all(1)
        table[:, GROUP.value] = torch.frombuffer(array("q", bucket.group_indices), dtype=torch.int64)
        table[:, TENSOR_ID.value] = torch.frombuffer(array("q", bucket.numbers), dtype=torch.int64)
        self.table = upload(table, bucket.device)


def _as_laid_out(tensor: Tensor, layout: Tensor) -> Tensor:
    """The tensor itself, if its elements lie in memory as those of `layout` do, else room for a copy.

    Elements of a lazily negated one do not: what lies there has the other sign.
    """
    if not tensor.is_neg() and all(
        stride == wanted or size == 1
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), layout.stride(), strict=True)
    ):
        return tensor
    return torch.empty_strided(layout.shape, layout.stride(), dtype=tensor.dtype, device=tensor.device)
