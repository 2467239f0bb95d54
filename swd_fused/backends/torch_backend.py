"""AdamS in plain PyTorch, on any device: the fallback and the definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.bucket import Bucket
from swd_fused.schedule import scalar_dtype

# Elements that are updated at once. On the CPU temporaries then need no fresh pages, which for a large tensor cost more
# than the whole update; smaller batches, that fit the cache better, lost more to the operators' own overhead (2^17: 1.4
# times as long). Elsewhere each batch is a round of launches.
CPU_BATCH = 1 << 20
DEVICE_BATCH = 1 << 26

TensorList = list[Tensor] | tuple[Tensor, ...]


class TorchBackend:
    def description(self, device: torch.device) -> str:
        return "torch"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        grad_sums = sums_of_squares(bucket.grads)
        bucket.grad_sum = grad_sums.sum()
        beta2, bias_correction2 = by_tensor(bucket, bucket.hyper.beta2), bias_corrections(bucket)[1]
        carried = beta2 * bucket.sums / bias_correction2
        fresh = (1 - beta2) * grad_sums / bias_correction2
        return torch.stack([carried, fresh]).sum(1)

    def max_exp_avg_sq_sum(self, bucket: Bucket, clip: Tensor | None) -> Tensor:
        sums = SumsByTensor(bucket.averaged)
        for batch in batches(bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.grads, groups=bucket.group_indices):
            exp_avg_sqs, max_exp_avg_sqs, raw_grads = batch.lists
            _, _, beta2, _, _, _, sign = bucket.hyper.numbers[batch.group]
            grads = scaled(raw_grads, exp_avg_sqs, sign, clip)
            next_exp_avg_sqs = torch._foreach_mul(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(next_exp_avg_sqs, grads, grads, value=1 - beta2)
            sums.add(batch, sums_of(torch._foreach_maximum(next_exp_avg_sqs, max_exp_avg_sqs)))
        return (sums.total() / bias_corrections(bucket)[1]).sum()

    def last_exp_avg_sq_sum(self, bucket: Bucket) -> Tensor:
        stepped = bucket.steps > 0
        bias_correction2 = 1 - by_tensor(bucket, bucket.hyper.beta2) ** bucket.steps
        hat_sums = torch.where(stepped, bucket.sums / bias_correction2, 0.0)
        return torch.stack([hat_sums, (stepped * bucket.numels).to(hat_sums.dtype)]).sum(1)

    def update(self, bucket: Bucket, exp_avg_sq_mean: Tensor, clip: Tensor | None) -> None:
        if bucket.grad_sum is None:
            bucket.grad_sum = sums_of_squares(bucket.grads).sum()
        decay_factors = schedule.decay_factor(exp_avg_sq_mean, bucket.hyper)
        bias_correction1, bias_correction2 = bias_corrections(bucket)
        scale = bias_correction2.sqrt()
        step_sizes = (by_tensor(bucket, bucket.hyper.lr) * scale / bias_correction1).neg().unbind()
        epss = (by_tensor(bucket, bucket.hyper.eps) * scale).unbind()
        lists = bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.averaged, bucket.grads
        sums = SumsByTensor(bucket.averaged)
        for batch in batches(*lists, groups=bucket.group_indices):
            update_(
                batch.lists,
                bucket.hyper.numbers[batch.group],
                [epss[i] for i in batch.indices],
                [step_sizes[i] for i in batch.indices],
                decay_factors[batch.group],
                clip,
                bucket.amsgrad,
            )
            sums.add(batch, sums_of(batch.lists[3]))
        bucket.steps += 1
        bucket.sums = sums.total()
        bucket.note_versions()

    def step(self, bucket: Bucket, max_grad_norm: float | None, lagged: bool) -> None:
        return None

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        sums = SumsByTensor(exp_avg_sqs)
        for batch in batches(exp_avg_sqs):
            sums.add(batch, sums_of(batch.lists[0]))
        return sums.total()


def update_(
    lists: list[list[Tensor]],
    hyper: tuple[float, ...],
    epss: list[Tensor],
    step_sizes: list[Tensor],
    decay_factor: Tensor,
    clip: Tensor | None,
    amsgrad: bool,
) -> None:
    """The definition, for lists of tensors of one group.

    `averaged` is max_exp_avg_sqs with amsgrad and exp_avg_sqs itself without. The second bias correction is moved from
    the tensors to the scalars: m / (sqrt(v / c) + eps) is sqrt(c) m / (sqrt(v) + sqrt(c) eps). So `epss` are
    sqrt(1 - b2^t) eps, and `step_sizes` -lr sqrt(1 - b2^t) / (1 - b1^t). Everything is computed in the second moment's
    dtype and rounded to the parameter's once.
    """
    params, exp_avgs, exp_avg_sqs, averaged, raw_grads = lists
    _, beta1, beta2, _, _, _, sign = hyper
    grads = scaled(raw_grads, exp_avg_sqs, sign, clip)
    torch._foreach_lerp_(exp_avgs, widened(grads, exp_avgs), 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)
    if amsgrad:
        torch._foreach_maximum_(averaged, exp_avg_sqs)
    denoms = torch._foreach_sqrt(averaged)
    torch._foreach_add_(denoms, epss)
    results = widened(params, exp_avg_sqs)
    torch._foreach_mul_(results, [decay_factor] * len(results))
    torch._foreach_addcmul_(results, torch._foreach_div(exp_avgs, denoms), step_sizes)
    torch._foreach_copy_(params, results)


def widened(tensors: TensorList, moments: list[Tensor]) -> list[Tensor]:
    return [tensor.to(moment.dtype) for tensor, moment in zip(tensors, moments, strict=True)]


def scaled(grads: list[Tensor], moments: list[Tensor], sign: float, clip: Tensor | None) -> TensorList:
    wide: TensorList = widened(grads, moments)
    if clip is not None:
        wide = torch._foreach_mul(wide, [clip * sign] * len(wide))
    elif sign < 0:
        wide = torch._foreach_neg(wide)
    return wide


def by_tensor(bucket: Bucket, column: Tensor) -> Tensor:
    return column[bucket.groups]


def bias_corrections(bucket: Bucket) -> tuple[Tensor, Tensor]:
    step = (bucket.steps + 1).to(bucket.hyper.table.dtype)
    beta1, beta2 = by_tensor(bucket, bucket.hyper.beta1), by_tensor(bucket, bucket.hyper.beta2)
    return 1 - beta1**step, 1 - beta2**step


# --- Sums, first by piece, then by tensor


class SumsByTensor:
    """Values for pieces, as `batches` makes them, added up for each tensor in float64."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._indices: list[int] = []
        self._values: list[Tensor] = []

    def add(self, batch: Batch, values: TensorList) -> None:
        self._indices += batch.indices
        self._values += values

    def total(self) -> Tensor:
        device = self._tensors[0].device
        total = torch.zeros(len(self._tensors), dtype=scalar_dtype(device), device=device)
        if self._values:
            indices = torch.tensor(self._indices, device="cpu").to(device, non_blocking=True)
            total.index_add_(0, indices, torch.stack(self._values).to(total.dtype))
        return total


def sums_of(pieces: TensorList) -> list[Tensor]:
    """In their own dtype, in which torch adds pairwise: in float64 from the start it took four times as long."""
    return [piece.sum() for piece in pieces]


def sums_of_squares(grads: list[Tensor]) -> Tensor:
    sums = SumsByTensor(grads)
    for batch in batches(grads):
        wide = [piece.to(torch.promote_types(piece.dtype, torch.float32)) for piece in batch.lists[0]]
        norms = torch._foreach_norm(wide, 2)
        sums.add(batch, torch._foreach_mul(norms, norms))
    return sums.total()


# --- Batches of pieces


class Batch(NamedTuple):
    group: int
    indices: list[int]  # of the tensor that each piece belongs to
    lists: list[list[Tensor]]


def batches(*lists: list[Tensor], groups: list[int] | None = None) -> Iterator[Batch]:
    """Parallel lists of tensors as parallel lists of pieces, those of one group at a time."""
    limit = CPU_BATCH if lists[0][0].is_cpu else DEVICE_BATCH
    groups = groups or [0] * len(lists[0])
    batch, numel = Batch(groups[0], [], [[] for _ in lists]), 0
    for index, (group, *tensors) in enumerate(zip(groups, *lists, strict=True)):
        for slab in slabs(tuple(tensors), limit):
            if batch.indices and (batch.group != group or numel >= limit):
                yield batch
                numel = 0
            if numel == 0:
                batch = Batch(group, [], [[] for _ in lists])
            batch.indices.append(index)
            for pieces, piece in zip(batch.lists, slab, strict=True):
                pieces.append(piece)
            numel += slab[0].numel()
    if batch.indices:
        yield batch


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
