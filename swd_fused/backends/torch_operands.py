"""The tensors of a batch as an update computes with them, in 32 bits at least, and how its results are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swd_fused.backends.torch_batches import Batch
from swd_fused.backends.torch_eight_bit import decoded, encode
from swd_fused.state.masters import joined, split
from swd_fused.state.rounding import stochastically_rounded
from swd_fused.tensors.bucket import Bucket


class Operands:
    """Holds what an update writes, in the dtype of the second moment: the stored tensor itself where that has it, or a
    copy. `params` are master weights where there are some, and there are maxima only with amsgrad."""

    def __init__(self, bucket: Bucket, batch: Batch) -> None:
        self._bucket, self._batch = bucket, batch
        self._params = batch.of(bucket.params)
        self._masters = batch.of(bucket.masters) if bucket.masters else []
        self._exp_avgs, self._exp_avg_sqs = batch.of(bucket.exp_avgs), batch.of(bucket.exp_avg_sqs)
        self._maxima = batch.of(bucket.max_exp_avg_sqs) if bucket.amsgrad else []
        if batch.is_coded:
            self.exp_avgs, self.exp_avg_sqs = decoded(bucket, "exp_avg", batch), decoded(bucket, "exp_avg_sq", batch)
        else:
            self.exp_avg_sqs = widened(self._exp_avg_sqs)
            self.exp_avgs = in_dtypes_of(self.exp_avg_sqs, self._exp_avgs)
        self.maxima = widened(self._maxima)
        self.params = in_dtypes_of(self.exp_avg_sqs, self._weights())

    def store(self, rounding_keys: Sequence[Tensor]) -> None:
        """Rounds what was computed to what is kept, once. The keys, by tensor, are those of stochastic rounding."""
        if self._batch.is_coded:
            encode(self._bucket, self._batch, self.exp_avgs, self.exp_avg_sqs, rounding_keys)
        else:
            copy(self._exp_avgs, self.exp_avgs)
            copy(self._exp_avg_sqs, self.exp_avg_sqs)
        copy(self._maxima, self.maxima)
        params = self.params
        if self._masters:
            params = self._store_masters()
        elif self._bucket.options.stochastic_rounding:
            params = self._rounded_params(rounding_keys)
        copy(self._params, params)

    def _weights(self) -> list[Tensor]:
        """Returns what is updated: parameters or their masters."""
        if not self._masters:
            return self._params
        pairs = zip(self._params, self._masters, strict=True)
        return [joined(param, master) if master.dtype == torch.int16 else master for param, master in pairs]

    def _store_masters(self) -> list[Tensor]:
        """Stores masters, or what they are beside their parameters, and returns the new parameters."""
        params, masters = list(self.params), list(self.params)
        for place, master in enumerate(self._masters):
            if master.dtype == torch.int16:
                params[place], masters[place] = split(self.params[place].to(torch.float32))
        copy(self._masters, masters)
        return params

    def _rounded_params(self, keys: Sequence[Tensor]) -> list[Tensor]:
        """Returns the new parameters, stochastically rounded where they are kept in bfloat16."""
        rounded = list(self.params)
        for place, (index, cut) in enumerate(zip(self._batch.indices, self._batch.cuts, strict=True)):
            if self._params[place].dtype == torch.bfloat16:
                numbers = self._bucket.element_numbers[index]
                part = numbers if cut is None else numbers.from_index(cut.dim, cut.begin)
                rounded[place] = stochastically_rounded(rounded[place], keys[index], part)
        return rounded


def widened(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors in at least 32 bits."""
    return [tensor.float() if tensor.dtype.itemsize < torch.float32.itemsize else tensor for tensor in tensors]


def in_dtypes_of(others: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    pairs = zip(others, tensors, strict=True)
    return [tensor if tensor.dtype == other.dtype else tensor.to(other.dtype) for other, tensor in pairs]


def copy(stored: list[Tensor], values: list[Tensor]) -> None:
    """Stores values where they are not in the same memory already."""
    pairs = [(tensor, value) for tensor, value in zip(stored, values, strict=True) if tensor is not value]
    if pairs:
        torch._foreach_copy_([tensor for tensor, _ in pairs], [value for _, value in pairs])
