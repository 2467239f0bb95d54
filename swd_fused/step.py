"""One step: pass 1, the number, pass 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.bucket import Bucket
from swd_fused.collective import Collective


class Number(NamedTuple):
    """What groups, devices and ranks agree on between the passes. A `grad_norm` of None is for pass 2 to find out."""

    exp_avg_sq_mean: Tensor
    grad_norm: Tensor | None
    clip: Tensor | None = None


def take_step(
    buckets: Sequence[Bucket], number: Callable[[], Number], before_update: Callable[[Tensor], None] | None
) -> tuple[Tensor, Tensor]:
    """All buckets meet in one number, exp_avg_sq_mean, which is returned with grad_norm.

    `before_update(exp_avg_sq_mean)` may still change the weight decay.
    """
    for bucket in buckets:
        bucket.check()
    exp_avg_sq_mean, grad_norm, clip = number()
    if before_update is not None:
        before_update(exp_avg_sq_mean)
    for bucket in buckets:
        mean = exp_avg_sq_mean.to(bucket.device, non_blocking=True)
        bucket.backend.update(bucket, mean, _at(clip, bucket))
    if grad_norm is None:
        home = exp_avg_sq_mean.device
        grad_sums = [bucket.grad_sum.to(home, non_blocking=True) for bucket in buckets if bucket.grad_sum is not None]
        grad_norm = torch.stack(grad_sums).sum().sqrt()
    return exp_avg_sq_mean, grad_norm


def exact(
    buckets: Sequence[Bucket],
    collective: Collective,
    max_grad_norm: float | None,
    total_numel: int | None,
    amsgrad: bool,
) -> Number:
    """Pass 1. `amsgrad` is whether any bucket has it, on any rank: its maxima take an all-reduce of their own."""
    grad_sum, carried, fresh, count = collective.total(
        [(bucket.sharding, _gradient_sums(bucket)) for bucket in buckets], 4
    ).unbind()
    grad_norm = grad_sum.sqrt()
    clip = None if max_grad_norm is None else schedule.clip_factor(grad_norm, max_grad_norm)
    # The recursion of each element holds for sums, but not for maxima.
    hat_sum = carried + (fresh if clip is None else clip.square() * fresh)
    if amsgrad:
        maxima = [
            (bucket.sharding, bucket.backend.max_exp_avg_sq_sum(bucket, _at(clip, bucket)).reshape(1))
            for bucket in buckets
            if bucket.amsgrad
        ]
        hat_sum = hat_sum + collective.total(maxima, 1)[0]
    return Number(hat_sum / (count.clamp(min=1) if total_numel is None else total_numel), grad_norm, clip)


def lagged(buckets: Sequence[Bucket], collective: Collective, total_numel: int | None) -> Number:
    """Instead of pass 1, of the buckets that took the step before."""
    rows = [(bucket.sharding, bucket.backend.last_exp_avg_sq_sum(bucket)) for bucket in buckets]
    return Number(last_mean(collective.total(rows, 2), total_numel), None)


def last_mean(last_sums: Tensor, total_numel: int | None) -> Tensor:
    return last_sums[0] / (last_sums[1].clamp(min=1) if total_numel is None else total_numel)


def _gradient_sums(bucket: Bucket) -> Tensor:
    carried, fresh = bucket.backend.gradient_sums(bucket).unbind()
    assert bucket.grad_sum is not None, "gradient_sums sets it"
    if bucket.amsgrad:
        carried = fresh = torch.zeros_like(bucket.grad_sum)
    return torch.stack([bucket.grad_sum, carried, fresh, bucket.count])


def _at(value: Tensor | None, bucket: Bucket) -> Tensor | None:
    return None if value is None else value.to(bucket.device, non_blocking=True)
