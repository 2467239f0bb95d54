"""Moments in 8 bits in plain PyTorch: tensors in pieces of whole blocks, decoded, updated and encoded again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.backends.torch_sums import batch_limit
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import BLOCK, scales_shape
from swd_fused.tensors.bucket import Bucket
from swd_fused.tensors.hyper import scalar_dtype


class Piece(NamedTuple):
    """Some rows of a tensor whose moments are codes; of a vector, some blocks."""

    bucket: Bucket
    tensor: int
    begin: int
    end: int

    def of(self, tensors: list[Tensor] | list[Tensor | None]) -> Tensor:
        tensor = tensors[self.tensor]
        assert tensor is not None, "tensors without a gradient have no pieces"
        return tensor[self.begin : self.end]

    def decoded(self, key: str) -> Tensor:
        return eight_bit.decoded(key, *self._stored(key))

    def store(self, exp_avg: Tensor, exp_avg_sq: Tensor, key: Tensor) -> None:
        """Rounds moments stochastically, by the tensor's key in this step."""
        noises = eight_bit.noise_of_blocks(key, self._block_numbers())
        for name, values, noise in zip(("exp_avg", "exp_avg_sq"), (exp_avg, exp_avg_sq), noises, strict=True):
            for stored, result in zip(self._stored(name), eight_bit.encoded(name, values, noise), strict=True):
                stored.copy_(result)

    def _stored(self, key: str) -> tuple[Tensor, Tensor]:
        bucket, in_blocks = self.bucket, slice(self.begin, self.end)
        codes, scales = (
            (bucket.exp_avgs, bucket.exp_avg_scales)
            if key == "exp_avg"
            else (bucket.exp_avg_sqs, bucket.exp_avg_sq_scales)
        )
        if self._is_vector:
            in_blocks = slice(self.begin // BLOCK, -(-self.end // BLOCK))
        return self.of(codes), scales[self.tensor][in_blocks]

    def _block_numbers(self) -> Tensor:
        numbers, device = self.bucket.block_numbers[self.tensor], self.bucket.device
        if self._is_vector:
            numbers = numbers._replace(first=numbers.first + self.begin // BLOCK)
            return numbers.of_rows(0, 1, -(-(self.end - self.begin) // BLOCK), device)
        blocks = scales_shape(self.bucket.params[self.tensor].shape)[-1]
        return numbers.of_rows(self.begin, self.end, blocks, device)

    @property
    def _is_vector(self) -> bool:
        return self.bucket.params[self.tensor].dim() == 1


def pieces_of_coded(bucket: Bucket) -> Iterator[Piece]:
    """Cuts tensors that have codes and a gradient into pieces, of which each is updated at once."""
    for index in bucket.coded:
        param = bucket.params[index]
        if bucket.grads[index] is None or not param.numel():
            continue
        for rows, _ in eight_bit.pieces(param.shape, batch_limit(param)):
            yield Piece(bucket, index, rows.start, min(rows.stop, param.shape[0]))


def sums_of_coded(bucket: Bucket, indices: list[int]) -> Tensor:
    """Returns the sums of these tensors' second moments, from their codes."""
    dtype = scalar_dtype(bucket.device)
    pairs = [(bucket.exp_avg_sqs[index], bucket.exp_avg_sq_scales[index]) for index in indices]
    return torch.stack([eight_bit.sum_of_squares(codes, scales, dtype) for codes, scales in pairs])
