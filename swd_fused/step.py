"""One step: pass 1, the number, pass 2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.bucket import Bucket


def take_step(
    buckets: list[Bucket],
    max_grad_norm: float | None,
    lagged: bool,
    before_update: Callable[[Tensor], None] | None,
) -> tuple[Tensor, Tensor]:
    """All buckets meet in one number, exp_avg_sq_mean, which is returned with grad_norm.

    `before_update(exp_avg_sq_mean)` may still change the weight decay.
    """
    if len(buckets) == 1 and before_update is None:
        result = buckets[0].backend.step(buckets[0], max_grad_norm, lagged)
        if result is not None:
            return result

    for bucket in buckets:
        bucket.check()
    home = buckets[0].device
    clip = None
    if lagged:
        total, count = _total([bucket.backend.last_exp_avg_sq_sum(bucket) for bucket in buckets], home).unbind()
        exp_avg_sq_mean = total / count.clamp(min=1)
    else:
        sums = [bucket.backend.gradient_sums(bucket).unbind() for bucket in buckets]
        grad_norm = _grad_norm(buckets, home)
        if max_grad_norm is not None:
            clip = schedule.clip_factor(grad_norm, max_grad_norm)
        hat_sums = [
            _exp_avg_sq_hat_sum(bucket, carried, fresh, clip)
            for bucket, (carried, fresh) in zip(buckets, sums, strict=True)
        ]
        exp_avg_sq_mean = _total(hat_sums, home) / max(1, sum(bucket.numel for bucket in buckets))

    if before_update is not None:
        before_update(exp_avg_sq_mean)
    for bucket in buckets:
        bucket.backend.update(bucket, _at(exp_avg_sq_mean, bucket), None if clip is None else _at(clip, bucket))
    return exp_avg_sq_mean, _grad_norm(buckets, home) if lagged else grad_norm


def _grad_norm(buckets: list[Bucket], home: torch.device) -> Tensor:
    return _total([bucket.grad_sum for bucket in buckets if bucket.grad_sum is not None], home).sqrt()


def _exp_avg_sq_hat_sum(bucket: Bucket, carried: Tensor, fresh: Tensor, clip: Tensor | None) -> Tensor:
    """Sum of v^ as this step will leave it: the recursion of each element holds for sums, but not for maxima."""
    if clip is not None:
        clip = _at(clip, bucket)
    if bucket.amsgrad:
        return bucket.backend.max_exp_avg_sq_sum(bucket, clip)
    return carried + (fresh if clip is None else clip.square() * fresh)


def _total(values: list[Tensor], home: torch.device) -> Tensor:
    if len(values) == 1:
        return values[0]
    return torch.stack([value.to(home, non_blocking=True) for value in values]).sum(0)


def _at(value: Tensor, bucket: Bucket) -> Tensor:
    return value.to(bucket.device, non_blocking=True)
