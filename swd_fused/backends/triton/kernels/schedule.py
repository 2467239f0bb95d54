"""Functions for the scalars of a step, in float64 on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.tables import HYPER


@triton.jit
def bias_correction(beta, step, longest, corrects_bias):
    """Returns 1 - beta^step, or 1 if bias is not corrected. No step is above `longest`, a scalar.

    Repeated squaring keeps 1 - beta^n instead of beta^n: 1 - ab is (1 - a) + (1 - b) a, so no digits cancel. The bits
    are the same on every device, and no library is called.
    """
    power, result = 1 - beta, beta * 0
    exponent, largest = step.to(tl.int32), longest.to(tl.int32)
    while largest > 0:
        result = tl.where(exponent % 2 == 1, result + power * (1 - result), result)
        power *= 2 - power
        exponent //= 2
        largest //= 2
    return tl.where(corrects_bias != 0, result, 1.0)


@triton.jit
def mean_of_sums(carried, fresh, grad_factor, numel):
    """Returns exp_avg_sq_mean, the mean of v^ over `numel` elements, from the sums between the passes.

    `carried` is the part of v^ from earlier steps, and `fresh` the part from this step's gradients, before these are
    multiplied by `grad_factor`.
    """
    return (carried + grad_factor * grad_factor * fresh) / tl.maximum(numel, 1.0)


@triton.jit
def decay_factor(exp_avg_sq_mean, row):
    """Returns the factor of weights. A mean of zero decays nothing; nor does NaN, which would spread."""
    lr, weight_decay, eps = tl.load(row + HYPER.decay_lr), tl.load(row + HYPER.weight_decay), tl.load(row + HYPER.eps)
    shrink = lr * weight_decay / (tl.sqrt(exp_avg_sq_mean) + eps)
    scheduled = tl.where(exp_avg_sq_mean > 0, tl.minimum(shrink, tl.load(row + HYPER.max_decay)), 0.0)
    return 1 - scheduled - lr * tl.load(row + HYPER.decoupled_decay)


@triton.jit
def ema_weight(step, row):
    """Returns the share of the new weight in its average: 1 - ema_decay, or with warm-up more in the first steps."""
    ema_decay, step = tl.load(row + HYPER.ema_decay), step.to(tl.float64)
    warm = tl.minimum(ema_decay, (1 + step) / (10 + step))
    return 1 - tl.where(tl.load(row + HYPER.ema_warmup) != 0, warm, ema_decay)


@triton.jit
def clip_factor(grad_norm, max_grad_norm):
    """Returns the factor of torch.nn.utils.clip_grad_norm_, its 1e-6 included. If it clips at all, NaN gives NaN."""
    factor = max_grad_norm / (grad_norm + 1e-6)
    return tl.where((factor > 1) | (max_grad_norm == float("inf")), 1.0, factor)
