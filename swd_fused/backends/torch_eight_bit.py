"""Moments in 8 bits in plain PyTorch: some rows of a tensor decoded, and encoded again after their update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swd_fused.backends.torch_batches import Batch, Cut
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import BLOCK, blocks_of_row
from swd_fused.tensors.bucket import Bucket
from swd_fused.tensors.hyper import scalar_dtype


def decoded(bucket: Bucket, key: str, batch: Batch) -> list[Tensor]:
    """Returns the moments of this name in float32."""
    return [eight_bit.decoded(key, *codes_and_scales(bucket, key, index, rows)) for index, rows in batch.coded_rows()]


def encode(
    bucket: Bucket, batch: Batch, exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], rounding_keys: Sequence[Tensor]
) -> None:
    """Stores both moments, rounded stochastically by the key of each tensor in this step."""
    for (index, rows), *moments in zip(batch.coded_rows(), exp_avgs, exp_avg_sqs, strict=True):
        keys = eight_bit.moment_keys(rounding_keys[index])
        noises = eight_bit.noise_of_blocks(keys, block_numbers(bucket, index, rows))
        for key, moment, noise in zip(("exp_avg", "exp_avg_sq"), moments, noises, strict=True):
            stored = codes_and_scales(bucket, key, index, rows)
            for tensor, result in zip(stored, eight_bit.encoded(key, moment, noise), strict=True):
                tensor.copy_(result)


def codes_and_scales(bucket: Bucket, key: str, index: int, rows: Cut) -> tuple[Tensor, Tensor]:
    if key == "exp_avg":
        codes, scales = bucket.exp_avgs[index], bucket.exp_avg_scales[index]
    else:
        codes, scales = bucket.exp_avg_sqs[index], bucket.exp_avg_sq_scales[index]
    return rows.of(codes), (blocks_of(rows) if codes.dim() == 1 else rows).of(scales)


def blocks_of(elements: Cut) -> Cut:
    """Returns where the scales of some elements of a vector are."""
    return Cut(0, elements.begin // BLOCK, blocks_of_row(elements.end))


def block_numbers(bucket: Bucket, index: int, rows: Cut) -> Tensor:
    numbers, scales = bucket.block_numbers[index], bucket.exp_avg_scales[index]
    if scales.dim() > 1:
        return numbers.of_rows(rows.begin, rows.end, scales.shape[1], bucket.device)
    _, begin, end = blocks_of(rows)
    return numbers._replace(first=numbers.first + begin).of_rows(0, 1, end - begin, bucket.device)


def sums_of_coded(bucket: Bucket, indices: list[int]) -> Tensor:
    """Returns the sums of these tensors' second moments, from their codes."""
    dtype = scalar_dtype(bucket.device)
    pairs = [(bucket.exp_avg_sqs[index], bucket.exp_avg_sq_scales[index]) for index in indices]
    return torch.stack([eight_bit.sum_of_squares(codes, scales, dtype) for codes, scales in pairs])
