"""One step: pass 1, the number, pass 2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.bucket import Bucket, Carried
from swd_fused.schedule import Hyper


class BucketStep:
    """A bucket on its way through a step, with its scalars by tensor."""

    def __init__(self, bucket: Bucket, hyper: Hyper, carried: Carried) -> None:
        self.bucket = bucket
        self.carried = carried
        self.group_indices = torch.tensor(bucket.group_indices, device=bucket.device)
        self.hyper = hyper.rows(self.group_indices)
        self.steps_before = carried.steps.to(hyper.table.dtype)
        self.bias_correction1 = 1 - self.hyper.beta1 ** (self.steps_before + 1)
        self.bias_correction2 = 1 - self.hyper.beta2 ** (self.steps_before + 1)

    def measure_gradients(self) -> Tensor:
        """Pass 1."""
        self.grad_sums = self.bucket.backend.gradient_sums(self.bucket.grads)
        return self.grad_sums.sum()

    def exp_avg_sq_hat_sum(self, clip: Tensor | None) -> Tensor:
        """Sum of v^ as this step will leave it."""
        if self.bucket.amsgrad:
            # No recursion for a maximum: a pass of its own, which must know the clip factor.
            scalars = self._scalars(clip, torch.ones_like(self.hyper.lr))
            sums = self.bucket.backend.max_exp_avg_sq_sums(self.bucket, scalars)
        else:
            sums = schedule.next_exp_avg_sq_sums(self.carried.sums, self.grad_sums, self.hyper.beta2, clip)
        return (sums / self.bias_correction2).sum()

    def last_exp_avg_sq_hat_sum(self) -> tuple[Tensor, Tensor]:
        """Sum of v^ as the step before left it, and its count, over the parameters that have taken a step."""
        stepped = self.steps_before > 0
        bias_correction2 = 1 - self.hyper.beta2**self.steps_before
        numels = torch.tensor(self.carried.numels, dtype=self.hyper.table.dtype, device=self.bucket.device)
        return torch.where(stepped, self.carried.sums / bias_correction2, 0.0).sum(), (stepped * numels).sum()

    def update(self, decay_factor: Tensor, clip: Tensor | None) -> Tensor:
        """Pass 2. Returns the sum of grad^2."""
        scalars = self._scalars(clip, decay_factor[self.group_indices])
        sums, grad_sums = self.bucket.backend.update(self.bucket, scalars)
        self.carried.advance(sums)
        return grad_sums.sum()

    def _scalars(self, clip: Tensor | None, decay_factor: Tensor) -> Tensor:
        hyper = self.hyper
        grad_scale = hyper.sign if clip is None else hyper.sign * clip
        step_size = hyper.lr / self.bias_correction1
        columns = [grad_scale, hyper.beta1, hyper.beta2, self.bias_correction2, hyper.eps, decay_factor, step_size]
        return torch.stack(columns, dim=1)


def take_step(
    buckets: list[BucketStep],
    hyper: Hyper,
    max_grad_norm: float | None,
    lagged: bool,
    before_update: Callable[[Tensor, Hyper], Hyper],
) -> tuple[Tensor, Tensor]:
    """All buckets meet in one number, exp_avg_sq_mean, which is returned with grad_norm.

    `before_update(exp_avg_sq_mean, hyper)` may still change the weight decay.
    """
    home = hyper.table.device
    clip = None
    if lagged:
        pairs = [bucket.last_exp_avg_sq_hat_sum() for bucket in buckets]
        total = _sum([pair[0] for pair in pairs], home)
        numel = _sum([pair[1] for pair in pairs], home)
        exp_avg_sq_mean = total / numel.clamp(min=1)
    else:
        grad_norm = _sum([bucket.measure_gradients() for bucket in buckets], home).sqrt()
        if max_grad_norm is not None:
            clip = schedule.clip_factor(grad_norm, max_grad_norm)
        sums = [bucket.exp_avg_sq_hat_sum(_at(clip, bucket)) for bucket in buckets]
        exp_avg_sq_mean = _sum(sums, home) / max(1, sum(sum(bucket.carried.numels) for bucket in buckets))

    hyper = before_update(exp_avg_sq_mean, hyper)
    decay_factor = schedule.decay_factor(exp_avg_sq_mean, hyper)
    grad_sums = [bucket.update(_moved(decay_factor, bucket), _at(clip, bucket)) for bucket in buckets]
    if lagged:
        grad_norm = _sum(grad_sums, home).sqrt()
    return exp_avg_sq_mean, grad_norm


def _sum(sums: list[Tensor], home: torch.device) -> Tensor:
    if len(sums) == 1:
        return sums[0]
    return torch.stack([value.to(home, non_blocking=True) for value in sums]).sum()


def _moved(value: Tensor, bucket: BucketStep) -> Tensor:
    return value.to(bucket.bucket.device, non_blocking=True)


def _at(value: Tensor | None, bucket: BucketStep) -> Tensor | None:
    return None if value is None else _moved(value, bucket)
