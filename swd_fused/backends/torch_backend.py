"""AdamS in plain PyTorch, on any device: the fallback and the definition."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.bucket import Bucket
from swd_fused.loss_scale import LossScale
from swd_fused.schedule import HyperRow, bias_corrections, scalar_dtype
from swd_fused.stochastic_rounding import rounding_keys, stochastically_rounded
from swd_fused.upload import upload

# Elements that are updated at once. On the CPU temporaries then need no fresh pages, which for a large tensor cost more
# than the whole update; smaller batches, that fit the cache better, lost more to the operators' own overhead (2^17: 1.4
# times as long). Elsewhere each batch is a round of launches.
CPU_BATCH = 1 << 20
DEVICE_BATCH = 1 << 26

TensorList = list[Tensor] | tuple[Tensor, ...]


class TorchBackend:
    is_capturable = False

    def description(self, device: torch.device) -> str:
        return "torch"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        grad_sums = sums_of_squares(bucket.grads)
        bucket.grad_sum = grad_sums.sum()
        beta2, bias_correction2 = by_tensor(bucket, "beta2"), bias_corrections_of(bucket)[1]
        carried = beta2 * bucket.sums / bias_correction2
        fresh = (1 - beta2) * grad_sums / bias_correction2
        return torch.stack([carried, fresh]).sum(1)

    def carried_sum(self, bucket: Bucket) -> Tensor:
        return bucket.carried_sum()

    def max_exp_avg_sq_sum(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        sums = SumsByTensor(bucket.averaged)
        for batch in batches(bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.grads, groups=bucket.group_indices):
            exp_avg_sqs, max_exp_avg_sqs, grads = map(widened, batch.lists)
            hyper = bucket.hyper.numbers[batch.group]
            grads = scaled(grads, hyper.sign, grad_factor)
            next_exp_avg_sqs = torch._foreach_mul(exp_avg_sqs, hyper.beta2)
            torch._foreach_addcmul_(next_exp_avg_sqs, grads, grads, value=1 - hyper.beta2)
            sums.add(batch, sums_of(torch._foreach_maximum(next_exp_avg_sqs, max_exp_avg_sqs)))
        return (sums.total() / bias_corrections_of(bucket)[1]).sum()

    def last_exp_avg_sq_sum(self, bucket: Bucket) -> Tensor:
        stepped = bucket.steps > 0
        bias_correction2 = bias_corrections(bucket.hyper, bucket.groups, bucket.steps)[1]
        hat_sums = torch.where(stepped, bucket.sums / bias_correction2, 0.0)
        return torch.stack([hat_sums, (stepped * bucket.numels).to(hat_sums.dtype)]).sum(1)

    def update(self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None) -> None:
        if bucket.grad_sum is None:
            bucket.grad_sum = sums_of_squares(bucket.grads).sum()
        if skip is not None and bool(skip):  # plain operations have to ask, as GradScaler does where it is not fused
            return
        decay_factors = schedule.decay_factor(exp_avg_sq_mean, bucket.hyper)
        bias_correction1, bias_correction2 = bias_corrections_of(bucket)
        scale = bias_correction2.sqrt()
        step_sizes = (by_tensor(bucket, "lr") * scale / bias_correction1).neg().unbind()
        epss = (by_tensor(bucket, "eps") * scale).unbind()
        seed = bucket.options.rounding_seed
        keys = None if seed is None else rounding_keys(seed, bucket.tensor_ids, bucket.steps + 1)
        weights = bucket.masters or bucket.params
        lists = bucket.params, weights, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.averaged, bucket.grads
        sums = SumsByTensor(bucket.averaged)
        for batch in batches(*lists, groups=bucket.group_indices):
            params, *updated = batch.lists
            results = update_(
                updated,
                bucket.hyper.numbers[batch.group],
                [epss[i] for i in batch.indices],
                [step_sizes[i] for i in batch.indices],
                decay_factors[batch.group],
                grad_factor,
                bucket.amsgrad,
            )
            if bucket.masters:
                store(updated[0], results)
            if keys is not None:
                results = [
                    stochastically_rounded(result, keys[index], first) if param.dtype == torch.bfloat16 else result
                    for param, result, index, first in zip(params, results, batch.indices, batch.firsts, strict=True)
                ]
            store(params, results)
            sums.add(batch, sums_of(updated[3]))
        bucket.steps += 1
        bucket.sums = sums.total()
        bucket.note_versions()

    def step(self, bucket: Bucket, max_grad_norm: float | None, lagged: bool, loss_scale: LossScale) -> None:
        return None

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        sums = SumsByTensor(exp_avg_sqs)
        for batch in batches(exp_avg_sqs):
            sums.add(batch, sums_of(batch.lists[0]))
        return sums.total()


def update_(
    lists: list[list[Tensor]],
    hyper: HyperRow,
    epss: list[Tensor],
    step_sizes: list[Tensor],
    decay_factor: Tensor,
    grad_factor: Tensor | None,
    amsgrad: bool,
) -> list[Tensor]:
    """The definition, for lists of tensors of one group: advances the moments, and returns the weights that follow.

    `averaged` is max_exp_avg_sqs with amsgrad and exp_avg_sqs itself without. The second bias correction is moved from
    the tensors to the scalars: m / (sqrt(v / c) + eps) is sqrt(c) m / (sqrt(v) + sqrt(c) eps). So `epss` are
    sqrt(1 - b2^t) eps, and `step_sizes` -lr sqrt(1 - b2^t) / (1 - b1^t). Everything is computed in 32 bits at least and
    rounded to what is stored once.
    """
    weights, exp_avgs, exp_avg_sqs, averaged, grads = map(widened, lists)
    grads = scaled(grads, hyper.sign, grad_factor)
    if hyper.l2:
        grads = list(torch._foreach_add(grads, weights, alpha=hyper.l2))
    torch._foreach_lerp_(exp_avgs, as_wide_as(grads, exp_avgs), 1 - hyper.beta1)
    grads = as_wide_as(grads, exp_avg_sqs)
    torch._foreach_mul_(exp_avg_sqs, hyper.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - hyper.beta2)
    if amsgrad:
        torch._foreach_maximum_(averaged, exp_avg_sqs)
    else:
        averaged = exp_avg_sqs
    for stored, wide in zip(lists[1:4], (exp_avgs, exp_avg_sqs, averaged), strict=True):
        store(stored, wide)
    denoms = torch._foreach_sqrt(averaged)
    torch._foreach_add_(denoms, epss)
    results = as_wide_as(weights, averaged)
    torch._foreach_mul_(results, [decay_factor] * len(results))
    ratios = torch._foreach_div(as_wide_as(exp_avgs, averaged), denoms)
    torch._foreach_addcmul_(results, ratios, step_sizes)
    return results


def widened(tensors: TensorList) -> list[Tensor]:
    """What is narrower than 32 bits, in 32."""
    if all(dtype.itemsize >= torch.float32.itemsize for dtype in set(dtypes_of(tensors))):
        return list(tensors)
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def store(tensors: list[Tensor], results: list[Tensor]) -> None:
    """Rounds what was computed to what is kept, where that is not the same memory already."""
    pairs = [(tensor, result) for tensor, result in zip(tensors, results, strict=True) if tensor is not result]
    if pairs:
        torch._foreach_copy_([tensor for tensor, _ in pairs], [result for _, result in pairs])


def as_wide_as(tensors: TensorList, others: TensorList) -> list[Tensor]:
    if dtypes_of(tensors) == dtypes_of(others):
        return list(tensors)
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, others, strict=True)]


def dtypes_of(tensors: TensorList) -> list[torch.dtype]:
    return list(map(attrgetter("dtype"), tensors))


def scaled(grads: TensorList, sign: float, grad_factor: Tensor | None) -> list[Tensor]:
    if grad_factor is not None:
        return list(torch._foreach_mul(grads, [grad_factor * sign] * len(grads)))
    return list(torch._foreach_neg(grads)) if sign < 0 else list(grads)


def by_tensor(bucket: Bucket, column: str) -> Tensor:
    return bucket.hyper.column(column)[bucket.groups]


def bias_corrections_of(bucket: Bucket) -> tuple[Tensor, Tensor]:
    return bias_corrections(bucket.hyper, bucket.groups, bucket.steps + 1)


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
            indices = upload(torch.tensor(self._indices, device="cpu"), device)
            total.index_add_(0, indices, torch.stack(self._values).to(total.dtype))
        return total


def sums_of(pieces: TensorList) -> list[Tensor]:
    """In 32 bits at least, in which torch adds pairwise: in float64 from the start it took four times as long."""
    return [piece.sum(dtype=torch.promote_types(piece.dtype, torch.float32)) for piece in pieces]


def sums_of_squares(grads: list[Tensor]) -> Tensor:
    sums = SumsByTensor(grads)
    for batch in batches(grads):
        norms = torch._foreach_norm(widened(batch.lists[0]), 2)
        sums.add(batch, torch._foreach_mul(norms, norms))
    return sums.total()


# --- Batches of pieces


class Batch(NamedTuple):
    group: int
    indices: list[int]  # of the tensor that each piece belongs to
    firsts: list[int]  # how many elements of it are in pieces before
    lists: list[list[Tensor]]


def batches(*lists: list[Tensor], groups: list[int] | None = None) -> Iterator[Batch]:
    """Parallel lists of tensors as parallel lists of pieces, those of one group at a time."""
    limit = CPU_BATCH if lists[0][0].is_cpu else DEVICE_BATCH
    groups = groups or [0] * len(lists[0])
    numels = list(map(Tensor.numel, lists[0]))
    if sum(numels) <= limit and all(numels) and len(set(groups)) == 1:
        yield Batch(groups[0], list(range(len(numels))), [0] * len(numels), [list(tensors) for tensors in lists])
        return
    batch, numel = Batch(groups[0], [], [], [[] for _ in lists]), 0
    for index, (group, *tensors) in enumerate(zip(groups, *lists, strict=True)):
        first = 0
        for slab in slabs(tuple(tensors), limit):
            if batch.indices and (batch.group != group or numel >= limit):
                yield batch
                numel = 0
            if numel == 0:
                batch = Batch(group, [], [], [[] for _ in lists])
            batch.indices.append(index)
            batch.firsts.append(first)
            first += slab[0].numel()
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
