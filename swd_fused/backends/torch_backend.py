"""AdamS in plain PyTorch, on any device: the fallback and the definition."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.backends.torch_eight_bit import pieces_of_coded, sums_of_coded
from swd_fused.backends.torch_sums import (
    Batch,
    SumsByTensor,
    TensorList,
    batch_limit,
    batches,
    dtypes_of,
    in_memory_order,
    row_sums,
    sums_of_squares,
    widened,
)
from swd_fused.schedule import Gate, bias_corrections
from swd_fused.state.eight_bit import moment_keys
from swd_fused.state.rounding import rounding_keys, stochastically_rounded
from swd_fused.tensors.bucket import Bucket
from swd_fused.tensors.hyper import Hyper, HyperRow

# Those that are tested ("cpu") or follow the same rules in torch's documentation ("cuda"). torch has more of them.
FUSED_DEVICES = ("cpu", "cuda")
FUSED_DTYPES = {torch.float32, torch.float64}
PLAIN_TYPES = {Tensor, torch.nn.Parameter}


class TorchBackend:
    is_capturable = False
    is_atomic = False

    def description(self, device: torch.device) -> str:
        return "torch"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def describe(self, bucket: Bucket) -> None:
        bucket.plan = None if bucket.is_fake or bucket.device.type == "meta" else Plan(bucket)

    def begin(self, bucket: Bucket) -> None:
        pass

    def pass1(self, bucket: Bucket) -> Tensor:
        grad_sums = sums_of_squares(bucket.grads, bucket.device)
        beta2, corrects_bias = beta2_of(bucket) if bucket.plan is None else bucket.plan.beta2_of(bucket)
        bias_correction2 = schedule.bias_correction(beta2, corrects_bias, bucket.steps + 1)
        carried = beta2 * bucket.known_sums() / bias_correction2
        if not bucket.has_all_grads:
            carried = torch.where(bucket.has_grad, carried, 0.0)
        fresh = (1 - beta2) * grad_sums / bias_correction2
        return torch.stack([grad_sums, carried, fresh]).sum(1)

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        sums = SumsByTensor(len(bucket.averaged), bucket.device)
        grads = without(bucket.grads, bucket.coded)
        for batch in batches(bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, grads, groups=bucket.group_indices):
            maxima = next_maxima(batch.lists, bucket.hyper.rows[batch.group], grad_factor)
            sums.add(batch.indices, torch.cat([row_sums(maximum.reshape(1, -1)) for maximum in maxima]))
        for piece in pieces_of_coded(bucket):
            lists = [[piece.decoded("exp_avg_sq")], [piece.of(bucket.max_exp_avg_sqs)], [piece.of(bucket.grads)]]
            (maximum,) = next_maxima(lists, bucket.hyper.rows[bucket.group_indices[piece.tensor]], grad_factor)
            sums.add([piece.tensor], row_sums(maximum.reshape(1, -1)))
        return (sums.total() / bias_corrections_of(bucket)[1]).sum()

    def carried(self, bucket: Bucket, after_this_step: bool) -> Tensor:
        return bucket.carried_sums(after_this_step)

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        grad_sq = sums_of_squares(bucket.grads, bucket.device).sum() if sum_grads else exp_avg_sq_mean
        if skip is not None and bool(skip):  # plain operations have to ask, as GradScaler does where it is not fused
            return grad_sq
        decay_factors = schedule.decay_factor(exp_avg_sq_mean, bucket.hyper)
        fused = [] if bucket.plan is None else bucket.plan.indices_for_fused_kernel(bucket)
        if len(fused) < len(bucket.present_grads):
            update_plainly(bucket, set(fused), decay_factors, grad_factor)
        if bucket.has_all_grads:
            bucket.steps += 1
        else:
            bucket.steps += bucket.has_grad
        if fused:
            update_by_fused_kernel(bucket, fused, decay_factors, grad_factor)
        self._sum_again(bucket)
        bucket.has_counted_writes = True
        return grad_sq

    def _sum_again(self, bucket: Bucket) -> None:
        if bucket.has_all_grads:
            bucket.sums = sums_of_averaged(bucket, bucket.averaged)
            return
        written = [None if g is None else v for v, g in zip(bucket.averaged, bucket.grads, strict=True)]
        bucket.sums = torch.where(bucket.has_grad, sums_of_averaged(bucket, written), bucket.known_sums())

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> None:
        return None

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        return sums_of_averaged(bucket, bucket.averaged)


def sums_of_averaged(bucket: Bucket, averaged: Sequence[Tensor | None]) -> Tensor:
    """Returns the sums of these of the bucket's second moments, 0 where there is none."""
    coded = [] if bucket.amsgrad else [index for index in bucket.coded if averaged[index] is not None]
    sums = SumsByTensor(len(averaged), bucket.device)
    sums.add_elements(without(averaged, coded) if coded else averaged)
    if coded:
        sums.add(coded, sums_of_coded(bucket, coded))
    return sums.total()


def without(tensors: Sequence[Tensor | None], indices: Collection[int]) -> list[Tensor | None]:
    """Returns the tensors with None in place of those at some indices."""
    return [None if index in indices else tensor for index, tensor in enumerate(tensors)]


def next_maxima(lists: list[list[Tensor]], hyper: HyperRow, grad_factor: Tensor | None) -> list[Tensor]:
    """Returns what max_exp_avg_sq will be after this step, given exp_avg_sq, max_exp_avg_sq and gradients."""
    exp_avg_sqs, max_exp_avg_sqs, grads = map(widened, lists)
    grads = scaled(grads, hyper.sign, grad_factor)
    next_exp_avg_sqs = torch._foreach_mul(exp_avg_sqs, hyper.beta2)
    torch._foreach_addcmul_(next_exp_avg_sqs, grads, grads, value=1 - hyper.beta2)
    return list(torch._foreach_maximum(next_exp_avg_sqs, max_exp_avg_sqs))


# --- The update by torch's own fused kernel: AdamS is AdamW with another weight decay in each step


class Plan:
    """Keeps what is known of a bucket's tensors."""

    def __init__(self, bucket: Bucket) -> None:
        self.steps = bucket.steps.unbind()  # in each step anew it took 0.4 ms for a thousand tensors
        lists = bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.grads_or_params
        self._fitting = [index for index, tensors in enumerate(zip(*lists, strict=True)) if fits_fused_kernel(tensors)]
        self._beta2: tuple[list[float], tuple[Tensor, Tensor]] | None = None  # by group, and by tensor

    def beta2_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Does what the function does, and only when one has changed."""
        by_group = [row.beta2 for row in bucket.hyper.rows]
        if self._beta2 is None or self._beta2[0] != by_group:
            self._beta2 = by_group, beta2_of(bucket)
        return self._beta2[1]

    def indices_for_fused_kernel(self, bucket: Bucket) -> list[int]:
        """Returns which tensors with a gradient torch's fused Adam kernel updates as the definition has it.

        It always corrects bias. Its maxima for amsgrad forget NaN in the last few elements of a tensor (torch 2.13). On
        a device it reads a learning rate that is a tensor in float32.
        """
        rows = bucket.hyper.rows
        is_plain = bucket.amsgrad or bucket.device.type not in FUSED_DEVICES
        if is_plain or not set(map(type, bucket.present_grads)) <= PLAIN_TYPES:
            return []
        reads_lr = can_be_read(bucket.steps)
        if bucket.has_all_grads and all(row.corrects_bias and (reads_lr or row.lr >= 0) for row in rows):
            return self._fitting
        return [
            index
            for index in self._fitting
            if bucket.grads[index] is not None
            and (row := rows[bucket.group_indices[index]]).corrects_bias
            and (reads_lr or row.lr >= 0 or bucket.params[index].dtype == torch.float32)
        ]


def fits_fused_kernel(tensors: tuple[Tensor, ...]) -> bool:
    """Tells whether the kernel may update a parameter, given with its moments and gradient.

    It walks memory without regard to strides, and rounds otherwise in 16 bits. A gradient in fewer bits is copied.
    """
    *written, grad = tensors
    (dtype, *others) = set(dtypes_of(written))
    if others or dtype not in FUSED_DTYPES or torch.promote_types(grad.dtype, dtype) != dtype:
        return False
    if not set(map(type, tensors)) <= PLAIN_TYPES:
        return False
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    return len(set(map(Tensor.stride, tensors))) == 1 and in_memory_order(grad).is_contiguous()


def update_by_fused_kernel(
    bucket: Bucket, indices: list[int], decay_factors: Tensor, grad_factor: Tensor | None
) -> None:
    """Updates these tensors, whose step counts are advanced already."""
    grads: list[Tensor] = bucket.grads  # type: ignore[assignment]
    lists = bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs, grads, bucket.plan.steps
    by_kind: defaultdict[tuple[int, torch.dtype, torch.dtype], list[int]] = defaultdict(list)
    for index in indices:
        by_kind[bucket.group_indices[index], bucket.params[index].dtype, grads[index].dtype].append(index)
    for (group, dtype, grad_dtype), members in by_kind.items():
        *tensors, steps = ([column[index] for index in members] for column in lists)
        update = FusedUpdate.of_group(bucket.hyper, group, decay_factors[group])
        if update.decays_first:
            torch._foreach_mul_(tensors[0], [decay_factors[group]] * len(members))
        if grad_factor is None and grad_dtype == dtype:
            update(tensors, steps)
        else:  # the kernel's own `grad_scale` would write to the gradients
            for batch in batches(*map(flat_if_cut, tensors)):
                *written, pieces = batch.lists
                copies = [piece.to(dtype) for piece in pieces]
                if grad_factor is not None:
                    copies = scaled(copies, 1.0, grad_factor.to(dtype))
                update([*written, copies], [steps[index] for index in batch.indices])
        # The kernel does not count its writes.
        torch.autograd.graph.increment_version([param for param in tensors[0] if not param.is_inference()])


class FusedUpdate(NamedTuple):
    """torch's fused Adam kernel with the hyper-parameters of a group."""

    row: HyperRow
    lr: float | Tensor
    weight_decay: float
    decays_first: bool  # whether weights must be decayed before, since the kernel does not

    @classmethod
    def of_group(cls, hyper: Hyper, group: int, decay_factor: Tensor) -> FusedUpdate:
        row, lr = hyper.rows[group], hyper.column("lr")[group]
        if not can_be_read(decay_factor):
            decays = bool(row.weight_decay or row.decoupled_decay)
            return cls(row, row.lr if row.lr >= 0 else lr.float(), 0.0, decays)
        shrink = 1 - float(decay_factor)
        weight_decay = shrink / float(lr) if shrink else 0.0
        if math.isinf(weight_decay):  # a learning rate of 1e-310
            return cls(row, float(lr), 0.0, True)
        return cls(row, float(lr), weight_decay, False)

    def __call__(self, tensors: list[list[Tensor]], steps: list[Tensor]) -> None:
        params, exp_avgs, exp_avg_sqs, grads = tensors
        kernel = torch._fused_adam_ if self.row.l2 else torch._fused_adamw_
        kernel(
            *(params, grads, exp_avgs, exp_avg_sqs, [], steps),
            lr=self.lr,
            beta1=self.row.beta1,
            beta2=self.row.beta2,
            weight_decay=self.row.l2 or self.weight_decay,
            eps=self.row.eps,
            amsgrad=False,
            maximize=self.row.sign < 0,
        )


def can_be_read(value: Tensor) -> bool:
    """Tells whether a number can be looked at without waiting for a device."""
    return value.is_cpu


def flat_if_cut(tensors: list[Tensor]) -> list[Tensor]:
    """Flattens dense tensors that `batches` cuts, so that pieces of them are dense too."""
    limit = batch_limit(tensors[0])
    return [in_memory_order(tensor).view(-1) if tensor.numel() > limit else tensor for tensor in tensors]


# --- The update in plain operations


def update_plainly(bucket: Bucket, done: set[int], decay_factors: Tensor, grad_factor: Tensor | None) -> None:
    """Updates tensors that have a gradient, but for those that are done. Leaves the step counts as they are."""
    bias_correction1, bias_correction2 = bias_corrections_of(bucket)
    scale = bias_correction2.sqrt()
    step_sizes = (by_tensor(bucket, "lr") * scale / bias_correction1).neg().unbind()
    epss = (by_tensor(bucket, "eps") * scale).unbind()
    if bucket.options.stochastic_rounding or bucket.coded:
        keys = rounding_keys(bucket.options.seed, bucket.tensor_ids, bucket.steps + 1)
    weights = bucket.masters or bucket.params

    def update(batch: Batch) -> None:
        params, *updated = batch.lists
        results = update_(
            updated,
            bucket.hyper.rows[batch.group],
            [epss[i] for i in batch.indices],
            [step_sizes[i] for i in batch.indices],
            decay_factors[batch.group],
            grad_factor,
            bucket.amsgrad,
        )
        if bucket.masters:
            store(updated[0], results)
        if bucket.options.stochastic_rounding:
            results = [
                stochastically_rounded(result, keys[index], bucket.element_numbers[index].from_index(*start))
                if param.dtype == torch.bfloat16
                else result
                for param, result, index, start in zip(params, results, batch.indices, batch.starts, strict=True)
            ]
        store(params, results)

    grads = without(bucket.grads, done.union(bucket.coded))
    lists = bucket.params, weights, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.averaged, grads
    for batch in batches(*lists, groups=bucket.group_indices):
        update(batch)
    for piece in pieces_of_coded(bucket):
        exp_avg, exp_avg_sq = piece.decoded("exp_avg"), piece.decoded("exp_avg_sq")
        averaged = piece.of(bucket.max_exp_avg_sqs) if bucket.amsgrad else exp_avg_sq
        tensors = [piece.of(bucket.params), piece.of(weights), exp_avg, exp_avg_sq, averaged, piece.of(bucket.grads)]
        group = bucket.group_indices[piece.tensor]
        update(Batch(group, [piece.tensor], [(0, piece.begin)], [[tensor] for tensor in tensors]))
        piece.store(exp_avg, exp_avg_sq, moment_keys(keys[piece.tensor]))


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


def store(tensors: list[Tensor], results: list[Tensor]) -> None:
    """Rounds what was computed to what is kept, where that is not the same memory already."""
    pairs = [(tensor, result) for tensor, result in zip(tensors, results, strict=True) if tensor is not result]
    if pairs:
        torch._foreach_copy_([tensor for tensor, _ in pairs], [result for _, result in pairs])


def as_wide_as(tensors: TensorList, others: TensorList) -> list[Tensor]:
    if dtypes_of(tensors) == dtypes_of(others):
        return list(tensors)
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, others, strict=True)]


def scaled(grads: TensorList, sign: float, grad_factor: Tensor | None) -> list[Tensor]:
    if grad_factor is not None:
        return list(torch._foreach_mul(grads, [grad_factor * sign] * len(grads)))
    return list(torch._foreach_neg(grads)) if sign < 0 else list(grads)


def by_tensor(bucket: Bucket, column: str) -> Tensor:
    return bucket.hyper.column(column)[bucket.groups]


def beta2_of(bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Returns beta2 of each tensor, and 1 where its bias is corrected."""
    return by_tensor(bucket, "beta2"), by_tensor(bucket, "corrects_bias")


def bias_corrections_of(bucket: Bucket) -> tuple[Tensor, Tensor]:
    return bias_corrections(bucket.hyper, bucket.groups, bucket.steps + 1)
