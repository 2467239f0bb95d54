"""AdamS in plain PyTorch, on any device: the fallback and the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from operator import attrgetter, is_not
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.backends.address_table import check_memory
from swd_fused.buckets import Bucket
from swd_fused.schedule import Gate, HyperRow, bias_corrections, scalar_dtype
from swd_fused.stochastic_rounding import rounding_keys, stochastically_rounded
from swd_fused.upload import is_fake, upload

# Elements that are updated at once. On the CPU temporaries then need no fresh pages, which for a large tensor cost more
# than the whole update; smaller batches, that fit the cache better, lost more to the operators' own overhead (2^17: 1.4
# times as long). Elsewhere each batch is a round of launches.
CPU_BATCH = 1 << 20
DEVICE_BATCH = 1 << 26

# Of a piece. Up to 2^20 squares, each of which may have lost 2^-126, then lose no more than float32's resolution.
LEAST_NORM = 2.0**-40

TensorList = list[Tensor] | tuple[Tensor, ...]


class TorchBackend:
    is_capturable = False

    def description(self, device: torch.device) -> str:
        return "torch"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def prepare(self, bucket: Bucket) -> None:
        bucket.check()
        if not is_fake(bucket.params[0]):
            check_memory(bucket)

    def pass1(self, bucket: Bucket) -> Tensor:
        grad_sums = sums_of_squares(bucket)
        beta2, bias_correction2 = by_tensor(bucket, "beta2"), bias_corrections_of(bucket)[1]
        carried = torch.where(bucket.has_grad, beta2 * bucket.sums / bias_correction2, 0.0)
        fresh = (1 - beta2) * grad_sums / bias_correction2
        return torch.stack([grad_sums, carried, fresh]).sum(1)

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        sums = SumsByTensor(bucket.averaged)
        for batch in batches(bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.grads, groups=bucket.group_indices):
            exp_avg_sqs, max_exp_avg_sqs, grads = map(widened, batch.lists)
            hyper = bucket.hyper.numbers[batch.group]
            grads = scaled(grads, hyper.sign, grad_factor)
            next_exp_avg_sqs = torch._foreach_mul(exp_avg_sqs, hyper.beta2)
            torch._foreach_addcmul_(next_exp_avg_sqs, grads, grads, value=1 - hyper.beta2)
            sums.add(batch, sums_of(torch._foreach_maximum(next_exp_avg_sqs, max_exp_avg_sqs)))
        return (sums.total() / bias_corrections_of(bucket)[1]).sum()

    def carried(self, bucket: Bucket, after_this_step: bool) -> Tensor:
        return bucket.carried_sums(after_this_step)

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        grad_sq = sums_of_squares(bucket).sum() if sum_grads else exp_avg_sq_mean
        if skip is not None and bool(skip):  # plain operations have to ask, as GradScaler does where it is not fused
            return grad_sq
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
                    stochastically_rounded(result, keys[index], bucket.element_numbers[index].from_index(*start))
                    if param.dtype == torch.bfloat16
                    else result
                    for param, result, index, start in zip(params, results, batch.indices, batch.starts, strict=True)
                ]
            store(params, results)
            sums.add(batch, sums_of(updated[3]))
        if bucket.has_all_grads:
            bucket.steps += 1
            bucket.sums = sums.total()
        else:
            bucket.sums = torch.where(bucket.has_grad, sums.total(), bucket.sums)
            bucket.steps += bucket.has_grad
        bucket.note_versions()
        return grad_sq

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> None:
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


def sums_of_squares(bucket: Bucket) -> Tensor:
    """Returns the sums of grad^2 by tensor, 0 where there is no gradient."""
    sums = SumsByTensor(bucket.params)
    for batch in batches(bucket.params, bucket.grads):
        norms = norms_of(widened(batch.lists[1]))
        sums.add(batch, torch.stack(norms).to(scalar_dtype(bucket.device)).square().unbind())
    return sums.total()


def norms_of(pieces: list[Tensor]) -> list[Tensor]:
    """In 32 bits, in which squares of numbers below 1e-19 or above 1e19 are lost: on the CPU such pieces are measured
    once more, scaled by a power of two. Others would have to be waited for, and are measured in float64, which on the
    CPU took 30 times as long."""
    if type(pieces[0]) is not Tensor or not pieces[0].is_cpu:
        return list(torch._foreach_norm(pieces, 2, dtype=scalar_dtype(pieces[0].device)))
    norms = list(torch._foreach_norm(pieces, 2))
    for i, norm in enumerate(torch.stack(norms).tolist()):
        if not LEAST_NORM <= norm < math.inf:
            scale = 2.0**-100 if norm >= LEAST_NORM else 2.0**100
            norms[i] = torch.linalg.vector_norm(pieces[i] * scale).double() / scale
    return norms


# --- Batches of pieces


class Batch(NamedTuple):
    group: int
    indices: list[int]  # of the tensor that each piece belongs to
    starts: list[tuple[int, int]]  # the dimension that it is cut along, and the index where the piece begins
    lists: list[list[Tensor]]


def batches(*lists: list[Tensor] | list[Tensor | None], groups: list[int] | None = None) -> Iterator[Batch]:
    """Cuts parallel lists of tensors into parallel lists of pieces, those of one group at a time.

    Leaves out places where one of them has None: parameters without a gradient.
    """
    first_list: list[Tensor] = lists[0]  # type: ignore[assignment]  # of parameters or moments
    limit = CPU_BATCH if first_list[0].is_cpu else DEVICE_BATCH
    groups = groups or [0] * len(lists[0])
    numels = list(map(Tensor.numel, first_list))
    is_whole = all(all(map(is_not, tensors, repeat(None))) for tensors in lists)
    if is_whole and sum(numels) <= limit and all(numels) and len(set(groups)) == 1:
        whole: list[list[Tensor]] = [list(tensors) for tensors in lists]  # type: ignore[arg-type]
        yield Batch(groups[0], list(range(len(numels))), [(0, 0)] * len(numels), whole)
        return
    batch, numel = Batch(groups[0], [], [], [[] for _ in lists]), 0
    for index, (group, *tensors) in enumerate(zip(groups, *lists, strict=True)):
        if not is_whole and any(tensor is None for tensor in tensors):
            continue
        for start, slab in slabs(tuple(tensors), limit):
            if batch.indices and (batch.group != group or numel >= limit):
                yield batch
                numel = 0
            if numel == 0:
                batch = Batch(group, [], [], [[] for _ in lists])
            batch.indices.append(index)
            batch.starts.append(start)
            for pieces, piece in zip(batch.lists, slab, strict=True):
                pieces.append(piece)
            numel += slab[0].numel()
    if batch.indices:
        yield batch


def slabs(tensors: tuple[Tensor, ...], limit: int) -> Iterator[tuple[tuple[int, int], tuple[Tensor, ...]]]:
    """Tensors of one shape, cut along their longest dimension: it and the index of each cut, and the pieces. Empty ones
    have none."""
    shape, numel = tensors[0].shape, tensors[0].numel()
    if numel == 0:
        return
    if numel <= limit:
        yield (0, 0), tensors
        return
    dim = shape.index(max(shape))
    rows = max(1, limit * shape[dim] // numel)
    pieces = zip(*(torch.split(tensor, rows, dim) for tensor in tensors), strict=True)
    yield from (((dim, number * rows), piece) for number, piece in enumerate(pieces))
