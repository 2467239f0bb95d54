"""AdamS in plain PyTorch, on any device: the fallback and the definition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from swd_fused.arguments import check_grads
from swd_fused.bucket import Bucket
from swd_fused.schedule import scalar_dtype

# Elements that are updated at once. On the CPU temporaries then stay in the cache and need no fresh pages, which for
# a large tensor cost more than the whole update. Elsewhere each batch is a round of launches.
CPU_BATCH = 1 << 17
DEVICE_BATCH = 1 << 26


TensorList = list[Tensor] | tuple[Tensor, ...]


class TorchBackend:
    name = "torch"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        check_grads(bucket.params, bucket.grads)
        grads = bucket.grads
        sums = zeros(grads)
        for indices, (pieces,) in batches(grads):
            norms = torch._foreach_norm(pieces, 2, dtype=sums[0].dtype)
            for index, norm in zip(indices, norms, strict=True):
                sums[index] += norm.square()
        return torch.stack(sums)

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        sums = zeros(exp_avg_sqs)
        for indices, (pieces,) in batches(exp_avg_sqs):
            add_sums(sums, indices, pieces)
        return torch.stack(sums)

    def max_exp_avg_sq_sums(self, bucket: Bucket, scalars: Tensor) -> Tensor:
        sums = zeros(bucket.grads)
        columns = [column.unbind() for column in scalars.unbind(1)]
        for indices, pieces in batches(bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.grads):
            exp_avg_sqs, max_exp_avg_sqs, grads = pieces
            grad_scales, _, beta2s, *_ = ([column[index] for index in indices] for column in columns)
            grads = scaled(grads, exp_avg_sqs, grad_scales)
            next_exp_avg_sqs = [exp_avg_sq.clone() for exp_avg_sq in exp_avg_sqs]
            move_averages_(next_exp_avg_sqs, torch._foreach_mul(grads, grads), beta2s)
            add_sums(sums, indices, torch._foreach_maximum(next_exp_avg_sqs, max_exp_avg_sqs))
        return torch.stack(sums)

    def update(self, bucket: Bucket, scalars: Tensor) -> tuple[Tensor, Tensor]:
        check_grads(bucket.params, bucket.grads)
        lists = [bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.averaged, bucket.grads]
        columns = [column.unbind() for column in scalars.unbind(1)]
        sums = zeros(bucket.params)
        for indices, pieces in batches(*lists):
            update_(bucket.amsgrad, *pieces, *([column[index] for index in indices] for column in columns))
            add_sums(sums, indices, pieces[3])
        return torch.stack(sums), self.gradient_sums(bucket)


def update_(
    amsgrad: bool,
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    averaged: list[Tensor],
    grads: list[Tensor],
    grad_scales: list[Tensor],
    beta1s: list[Tensor],
    beta2s: list[Tensor],
    bias_correction2s: list[Tensor],
    epss: list[Tensor],
    decay_factors: list[Tensor],
    step_sizes: list[Tensor],
) -> None:
    """The definition, for lists of tensors and of zero-dimensional scalars.

    `averaged` is `max_exp_avg_sqs` with amsgrad and `exp_avg_sqs` itself without. Everything is computed in the
    moments' dtype and rounded to the parameter's once.
    """
    grads = scaled(grads, exp_avg_sqs, grad_scales)
    move_averages_(exp_avgs, grads, beta1s)
    move_averages_(exp_avg_sqs, torch._foreach_mul(grads, grads), beta2s)
    if amsgrad:
        torch._foreach_maximum_(averaged, exp_avg_sqs)
    denoms = torch._foreach_div(averaged, bias_correction2s)
    torch._foreach_sqrt_(denoms)
    torch._foreach_add_(denoms, epss)
    updates = torch._foreach_div(exp_avgs, denoms)
    torch._foreach_mul_(updates, step_sizes)
    decayed = torch._foreach_mul([p.to(update.dtype) for p, update in zip(params, updates, strict=True)], decay_factors)
    torch._foreach_sub_(decayed, updates)
    torch._foreach_copy_(params, decayed)


def scaled(grads: list[Tensor], moments: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    widened = [grad.to(moment.dtype) for grad, moment in zip(grads, moments, strict=True)]
    return list(torch._foreach_mul(widened, scales))


def move_averages_(averages: TensorList, values: TensorList, betas: list[Tensor]) -> None:
    """average <- beta * average + (1 - beta) * value"""
    torch._foreach_mul_(averages, betas)
    torch._foreach_add_(averages, torch._foreach_mul(values, [1 - beta for beta in betas]))


def zeros(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros((), dtype=scalar_dtype(tensor.device), device=tensor.device) for tensor in tensors]


def add_sums(sums: list[Tensor], indices: list[int], pieces: TensorList) -> None:
    for index, piece in zip(indices, pieces, strict=True):
        sums[index] += piece.sum(dtype=sums[index].dtype)


def batches(*lists: list[Tensor]) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """Parallel lists of tensors as parallel lists of pieces, a batch at a time, with each piece's index."""
    limit = CPU_BATCH if lists[0][0].is_cpu else DEVICE_BATCH
    indices: list[int] = []
    pieces: list[list[Tensor]] = [[] for _ in lists]
    numel = 0
    for index, tensors in enumerate(zip(*lists, strict=True)):
        for slab in slabs(tensors, limit):
            indices.append(index)
            for column, piece in zip(pieces, slab, strict=True):
                column.append(piece)
            numel += slab[0].numel()
            if numel >= limit:
                yield indices, pieces
                indices, pieces, numel = [], [[] for _ in lists], 0
    if indices:
        yield indices, pieces


def slabs(tensors: tuple[Tensor, ...], limit: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, cut along their longest dimension. Empty ones have none."""
    shape, numel = tensors[0].shape, tensors[0].numel()
    if numel == 0:
        return
    if numel <= limit:
        yield tensors
        return
    dim = shape.index(max(shape))
    rows = max(1, limit * shape[dim] // numel)
    yield from zip(*(torch.split(tensor, rows, dim) for tensor in tensors), strict=True)
