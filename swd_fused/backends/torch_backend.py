"""AdamS in plain PyTorch, on any device: the fallback, and the paper's algorithm 2 to be read beside it.

    the paper                                      here
    g  = gradient of the loss                      grad, times grad_factor (the inverse loss scale, and clipping)
    m  = b1 m + (1 - b1) g                         exp_avg
    v  = b2 v + (1 - b2) g^2                       exp_avg_sq
    m^ = m / (1 - b1^t)                            bias_correction1 is 1 - b1^t
    v^ = v / (1 - b2^t)                            bias_correction2 is 1 - b2^t
    v_ = mean(v^)                                  exp_avg_sq_mean, over all tensors, from the sums of `pass1`
    p  = p - lr / (sqrt(v^) + eps) m^              param, in `update_`
           - lr / (sqrt(v_) + eps) lambda p        decay_factor, by which p is multiplied, in schedule.py;
                                                   if cautious, where the update has the sign of p

The mean must be known before the first tensor is written. For it `pass1` does not compute v, except for amsgrad: the
sum of v over a tensor is b2 times the sum that `pass2` of the step before has left, plus (1 - b2) times that of g^2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from swd_fused.backends.torch_batches import Batch, batches
from swd_fused.backends.torch_eight_bit import decoded, sums_of_coded
from swd_fused.backends.torch_fused_kernel import FusedKernel
from swd_fused.backends.torch_operands import Operands, in_dtypes_of, widened
from swd_fused.backends.torch_sums import row_sums, sums_by_tensor, sums_of_elements, sums_of_squares
from swd_fused.schedule import Gate, bias_correction, bias_corrections, decay_factor
from swd_fused.state.rounding import rounding_keys
from swd_fused.tensors.bucket import Bucket
from swd_fused.tensors.hyper import HyperRow


class TorchBackend:
    is_capturable = False
    is_atomic = False

    def description(self, device: torch.device) -> str:
        return "torch"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def describe(self, bucket: Bucket) -> None:
        bucket.plan = FusedKernel(bucket)

    def begin(self, bucket: Bucket) -> None:
        pass

    def pass1(self, bucket: Bucket) -> Tensor:
        beta2 = by_tensor(bucket, "beta2")
        bias_correction2 = bias_correction(beta2, by_tensor(bucket, "corrects_bias"), bucket.steps + 1)
        grad_sq = sums_of_squares(bucket.grads, bucket.device)
        carried = torch.where(bucket.has_grad, beta2 * bucket.known_sums() / bias_correction2, 0.0)
        fresh = (1 - beta2) * grad_sq / bias_correction2
        return torch.stack([grad_sq, carried, fresh]).sum(1)

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        parts = []
        for batch in batches_with_grad(bucket):
            stored = decoded(bucket, "exp_avg_sq", batch) if batch.is_coded else widened(batch.of(bucket.exp_avg_sqs))
            exp_avg_sqs = [exp_avg_sq.clone() for exp_avg_sq in stored]
            grads = scaled_grads(bucket, batch, grad_factor)
            advance_exp_avg_sqs_(exp_avg_sqs, grads, bucket.hyper.rows[batch.group])
            maxima = torch._foreach_maximum(exp_avg_sqs, widened(batch.of(bucket.max_exp_avg_sqs)))
            parts.append((batch.indices, torch.cat([row_sums(maximum.reshape(1, -1)) for maximum in maxima])))
        _, bias_correction2 = bias_corrections(bucket.hyper, bucket.groups, bucket.steps + 1)
        return (sums_by_tensor(parts, len(bucket.params), bucket.device) / bias_correction2).sum()

    def carried(self, bucket: Bucket, after_this_step: bool) -> Tensor:
        return bucket.carried_sums(after_this_step)

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        grad_sq = sums_of_squares(bucket.grads, bucket.device).sum() if sum_grads else exp_avg_sq_mean
        if skip is not None and bool(skip):  # plain operations have to ask, as GradScaler does where it is not fused
            return grad_sq
        bucket.steps += bucket.has_grad
        decay_factors = decay_factor(exp_avg_sq_mean, bucket.hyper)
        done = bucket.plan.update(bucket, decay_factors, grad_factor)
        if len(done) < len(bucket.present_grads):
            update_plainly(bucket, done, decay_factors, grad_factor)
        sums = sums_of_averaged(bucket, bucket.present)
        bucket.sums = sums if bucket.has_all_grads else torch.where(bucket.has_grad, sums, bucket.known_sums())
        bucket.has_counted_writes = True
        return grad_sq

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> None:
        return None

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        return sums_of_averaged(bucket, [True] * len(bucket.params))


# --- The update of an element


def update_(
    tensors: Operands,
    grads: list[Tensor],
    row: HyperRow,
    decay_factor: Tensor,
    step_sizes: list[Tensor],
    epss: list[Tensor],
) -> None:
    """Updates tensors of one parameter group in place, all in the dtype of the second moment.

    Bias is corrected in scalars: with c1 = 1 - b1^t and c2 = 1 - b2^t, the paper's lr m^ / (sqrt(v^) + eps) is
    (lr sqrt(c2) / c1) m / (sqrt(v) + sqrt(c2) eps). So `step_sizes` are -lr sqrt(c2) / c1, and `epss` sqrt(c2) eps.
    """
    params, exp_avgs, exp_avg_sqs, maxima = tensors.params, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.maxima
    if row.l2:
        grads = list(torch._foreach_add(grads, params, alpha=row.l2))
    grads = in_dtypes_of(exp_avg_sqs, grads)
    torch._foreach_lerp_(exp_avgs, grads, 1 - row.beta1)
    advance_exp_avg_sqs_(exp_avg_sqs, grads, row)
    if maxima:
        torch._foreach_maximum_(maxima, exp_avg_sqs)
    denoms = torch._foreach_sqrt(maxima or exp_avg_sqs)
    torch._foreach_add_(denoms, epss)
    if row.cautious:
        torch._foreach_mul_(params, list(map(partial(cautious_factors, decay_factor), params, exp_avgs)))
    else:
        torch._foreach_mul_(params, [decay_factor] * len(params))
    torch._foreach_addcmul_(params, torch._foreach_div(exp_avgs, denoms), step_sizes)


def cautious_factors(decay_factor: Tensor, param: Tensor, exp_avg: Tensor) -> Tensor:
    """Returns what a parameter is multiplied by if it decays only where the update does not point away from zero.

    The update has exp_avg's sign. Both signs are looked at: the product of two small numbers would be zero.
    """
    agrees = torch.where(param < 0, -exp_avg, exp_avg) >= 0
    return torch.where(agrees, decay_factor.to(param.dtype), 1.0)


def advance_exp_avg_sqs_(exp_avg_sqs: list[Tensor], grads: list[Tensor], row: HyperRow) -> None:
    torch._foreach_mul_(exp_avg_sqs, row.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - row.beta2)


def update_plainly(bucket: Bucket, done: set[int], decay_factors: Tensor, grad_factor: Tensor | None) -> None:
    """Updates tensors that have a gradient, but for those that are done. Step counts are advanced already."""
    bias_correction1, bias_correction2 = bias_corrections(bucket.hyper, bucket.groups, bucket.steps)
    root = bias_correction2.sqrt()
    step_sizes = (by_tensor(bucket, "lr") * root / bias_correction1).neg().unbind()
    epss = (by_tensor(bucket, "eps") * root).unbind()
    keys: Sequence[Tensor] = ()
    if bucket.options.stochastic_rounding or bucket.coded:
        keys = rounding_keys(bucket.options.seed, bucket.tensor_ids, bucket.steps).unbind()
    for batch in batches_with_grad(bucket, done):
        tensors = Operands(bucket, batch)
        update_(
            tensors,
            scaled_grads(bucket, batch, grad_factor),
            bucket.hyper.rows[batch.group],
            decay_factors[batch.group],
            [step_sizes[index] for index in batch.indices],
            [epss[index] for index in batch.indices],
        )
        tensors.store(keys)


def batches_with_grad(bucket: Bucket, done: Collection[int] = ()) -> Iterator[Batch]:
    left = [index for index, grad in enumerate(bucket.grads) if grad is not None and index not in done]
    return batches(bucket.params, left, bucket.group_indices, bucket.block_numbers)


def scaled_grads(bucket: Bucket, batch: Batch, grad_factor: Tensor | None) -> list[Tensor]:
    """Returns gradients as the paper has them: unscaled, clipped, and of what is to be minimized."""
    grads = widened(batch.of(bucket.grads))  # type: ignore[arg-type]  # batches have only tensors with a gradient
    sign = bucket.hyper.rows[batch.group].sign
    if grad_factor is not None:
        return list(torch._foreach_mul(grads, [grad_factor * sign] * len(grads)))
    return list(torch._foreach_neg(grads)) if sign < 0 else grads


def by_tensor(bucket: Bucket, column: str) -> Tensor:
    return bucket.hyper.column(column)[bucket.groups]


def sums_of_averaged(bucket: Bucket, wanted: list[bool]) -> Tensor:
    """Returns the sums of v by tensor, or of its maxima with amsgrad; 0 for those that are not wanted."""
    coded = [] if bucket.amsgrad else [index for index in bucket.coded if wanted[index]]
    plain = [v if is_wanted else None for v, is_wanted in zip(bucket.averaged, wanted, strict=True)]
    for index in coded:
        plain[index] = None
    parts = sums_of_elements(plain)
    if coded:
        parts.append((coded, sums_of_coded(bucket, coded)))
    return sums_by_tensor(parts, len(bucket.params), bucket.device)
