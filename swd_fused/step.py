"""One step: pass 1, the number, pass 2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.bucket import Bucket
from swd_fused.schedule import Hyper


class BucketStep:
    """A bucket on its way through a step, with its scalars by tensor."""

    def __init__(self, bucket: Bucket, hyper: Hyper) -> None:
        self.bucket = bucket
        self.hyper = hyper.rows(bucket.group_indices)
        self.steps_before = bucket.steps.to(hyper.table.dtype)
        self.bias_correction1, self.bias_correction2 = schedule.bias_corrections(self.hyper, self.steps_before + 1)

    def gradient_sum(self) -> Tensor:
        """Pass 1."""
        self.grad_sums = self.bucket.backend.gradient_sums(self.bucket)
        return self.grad_sums.sum()

    def exp_avg_sq_hat_sum(self, clip: Tensor | None) -> Tensor:
        """Sum of v^ as this step will leave it."""
        if self.bucket.amsgrad:
            # No recursion for a maximum: a pass of its own, which must know the clip factor.
            scalars = self._scalars(clip, torch.ones_like(self.bias_correction1))
            sums = self.bucket.backend.max_exp_avg_sq_sums(self.bucket, scalars)
        else:
            sums = schedule.next_exp_avg_sq_sums(self.bucket.sums, self.grad_sums, self.hyper.beta2, clip)
        return (sums / self.bias_correction2).sum()

    def last_exp_avg_sq_hat_sum(self) -> tuple[Tensor, Tensor]:
        """Sum of v^ as the step before left it, and its count, over the parameters that have taken a step."""
        stepped = self.steps_before > 0
        _, bias_correction2 = schedule.bias_corrections(self.hyper, self.steps_before)
        numels = self.steps_before.new_tensor(self.bucket.numels)
        return torch.where(stepped, self.bucket.sums / bias_correction2, 0.0).sum(), (stepped * numels).sum()

    def update(self, decay_factor: Tensor, clip: Tensor | None) -> Tensor:
        """Pass 2. Returns the sum of grad^2."""
        scalars = self._scalars(clip, decay_factor[self.bucket.group_indices])
        sums, grad_sums = self.bucket.backend.update(self.bucket, scalars)
        self.bucket.steps.add_(1)
        self.bucket.set_sums(sums)
        return grad_sums.sum()

    def _scalars(self, clip: Tensor | None, decay_factor: Tensor) -> Tensor:
        hyper = self.hyper
        grad_scale = hyper.sign if clip is None else hyper.sign * clip
        step_size = hyper.lr / self.bias_correction1
        columns = [grad_scale, hyper.beta1, hyper.beta2, self.bias_correction2, hyper.eps, decay_factor, step_size]
        return torch.stack(columns, dim=1)


def take_step(
    buckets: list[Bucket],
    hyper: Hyper,
    max_grad_norm: float | None,
    lagged: bool,
    before_update: Callable[[Tensor, Hyper], Hyper],
) -> tuple[Tensor, Tensor]:
    """All buckets meet in one number, exp_avg_sq_mean, which is returned with grad_norm.

    `before_update(exp_avg_sq_mean, hyper)` may still change the weight decay.
    """
    home = hyper.table.device
    steps = [BucketStep(bucket, hyper.to(bucket.device)) for bucket in buckets]
    clip = None
    if lagged:
        last = [step.last_exp_avg_sq_hat_sum() for step in steps]
        count = _total([count for _, count in last], home)
        exp_avg_sq_mean = _total([total for total, _ in last], home) / count.clamp(min=1)
    else:
        grad_norm = _total([step.gradient_sum() for step in steps], home).sqrt()
        if max_grad_norm is not None:
            clip = schedule.clip_factor(grad_norm, max_grad_norm)
        sums = [step.exp_avg_sq_hat_sum(_moved(clip, step)) for step in steps]
        exp_avg_sq_mean = _total(sums, home) / max(1, sum(bucket.numel for bucket in buckets))

    hyper = before_update(exp_avg_sq_mean, hyper)
    decay_factor = schedule.decay_factor(exp_avg_sq_mean, hyper)
    grad_sums = [step.update(decay_factor.to(step.bucket.device), _moved(clip, step)) for step in steps]
    if lagged:
        grad_norm = _total(grad_sums, home).sqrt()
    return exp_avg_sq_mean, grad_norm


def _total(values: list[Tensor], home: torch.device) -> Tensor:
    if len(values) == 1:
        return values[0]
    return torch.stack([value.to(home, non_blocking=True) for value in values]).sum()


def _moved(value: Tensor | None, step: BucketStep) -> Tensor | None:
    return None if value is None else value.to(step.bucket.device, non_blocking=True)
