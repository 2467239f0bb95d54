"""One step: pass 1, the number, pass 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.bucket import Bucket
from swd_fused.distributed.collective import Collective
from swd_fused.loss_scale import LossScale
from swd_fused.upload import moved


class Number(NamedTuple):
    """What groups, devices and ranks agree on between the passes. A `grad_norm` of None is for pass 2 to find out."""

    exp_avg_sq_mean: Tensor
    grad_norm: Tensor | None
    grad_factor: Tensor | None = None  # what gradients are multiplied by
    skip: Tensor | None = None  # 1 if the step must change nothing, else 0


class Result(NamedTuple):
    exp_avg_sq_mean: Tensor
    grad_norm: Tensor
    skip: Tensor | None


def take_step(
    buckets: Sequence[Bucket],
    number: Callable[[], Number],
    loss_scale: LossScale,
    before_update: Callable[[Tensor], None] | None,
) -> Result:
    """All buckets meet in one number, exp_avg_sq_mean.

    `before_update(exp_avg_sq_mean)` may still change the weight decay.
    """
    for bucket in buckets:
        bucket.check()
    exp_avg_sq_mean, grad_norm, grad_factor, skip = number()
    if before_update is not None:
        before_update(exp_avg_sq_mean)
    for bucket in buckets:
        mean = moved(exp_avg_sq_mean, bucket.device)
        bucket.backend.update(bucket, mean, _at(grad_factor, bucket), _at(skip, bucket))
    if grad_norm is None:
        home = exp_avg_sq_mean.device
        grad_sums = [moved(bucket.grad_sum, home) for bucket in buckets if bucket.grad_sum is not None]
        grad_norm = torch.stack(grad_sums).sum().sqrt()
        unscale = loss_scale.unscale(home)
        grad_norm = grad_norm if unscale is None else unscale * grad_norm
    return Result(exp_avg_sq_mean, grad_norm, skip)


def exact(
    buckets: Sequence[Bucket],
    collective: Collective,
    max_grad_norm: float | None,
    total_numel: int | None,
    amsgrad: bool,
    loss_scale: LossScale,
) -> Number:
    """Pass 1. `amsgrad` is whether any bucket has it, on any rank: its maxima take an all-reduce of their own."""
    rows = [(bucket.sharding, _gradient_sums(bucket)) for bucket in buckets]
    grad_sum, carried, fresh, count = collective.total(rows, 4).unbind()
    grad_norm, grad_factor = clipped(grad_sum, max_grad_norm, loss_scale.unscale(collective.device))
    # The recursion of each element holds for sums, but not for maxima.
    hat_sum = carried + (fresh if grad_factor is None else grad_factor.square() * fresh)
    if amsgrad:
        maxima = [
            (bucket.sharding, bucket.backend.max_exp_avg_sq_sum(bucket, _at(grad_factor, bucket)).reshape(1))
            for bucket in buckets
            if bucket.amsgrad
        ]
        hat_sum = hat_sum + collective.total(maxima, 1)[0]
    exp_avg_sq_mean = hat_sum / (count.clamp(min=1) if total_numel is None else total_numel)
    return Number(exp_avg_sq_mean, grad_norm, grad_factor, skipped(loss_scale, grad_norm, collective))


def lagged(buckets: Sequence[Bucket], collective: Collective, total_numel: int | None, loss_scale: LossScale) -> Number:
    """Instead of pass 1, of the buckets that took the step before."""
    rows = [(bucket.sharding, bucket.backend.last_exp_avg_sq_sum(bucket)) for bucket in buckets]
    skip = skipped(loss_scale, None, collective)
    mean = last_mean(collective.total(rows, 2), total_numel)
    return Number(mean, None, loss_scale.unscale(collective.device), skip)


def clipped(grad_sum: Tensor, max_grad_norm: float | None, unscale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The norm of gradients that are to be multiplied by `unscale`, and what they are to be multiplied by in all."""
    grad_norm = grad_sum.sqrt() if unscale is None else unscale * grad_sum.sqrt()
    if max_grad_norm is None:
        return grad_norm, unscale
    clip = schedule.clip_factor(grad_norm, max_grad_norm)
    return grad_norm, clip if unscale is None else unscale * clip


def skipped(loss_scale: LossScale, grad_norm: Tensor | None, collective: Collective) -> Tensor | None:
    """All ranks skip a step in which any of them has found an infinity, on meshes unknown to GradScaler too."""
    if not loss_scale.may_skip:
        return None
    found = loss_scale.found(collective.device)
    if loss_scale.found_inf is not None:
        found = collective.largest(found)
    return loss_scale.skip(found, grad_norm)


def last_mean(last_sums: Tensor, total_numel: int | None) -> Tensor:
    return last_sums[0] / (last_sums[1].clamp(min=1) if total_numel is None else total_numel)


def _gradient_sums(bucket: Bucket) -> Tensor:
    carried, fresh = bucket.backend.gradient_sums(bucket).unbind()
    assert bucket.grad_sum is not None, "gradient_sums sets it"
    if bucket.amsgrad:
        carried = fresh = torch.zeros_like(bucket.grad_sum)
    return torch.stack([bucket.grad_sum, carried, fresh, bucket.count])


def _at(value: Tensor | None, bucket: Bucket) -> Tensor | None:
    return None if value is None else moved(value, bucket.device)
