"""The AdamS update of one element: the only place in Triton where the mathematics stand."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

# What an update takes besides its operands, the same for all elements of a segment.
Scalars = namedtuple(
    "Scalars",
    "grad_scale l2 inv_sqrt_bias_correction2 eps decay_factor step_size from_grad exp_avg_slope beta2 one_minus_beta2 "
    "opposed_decay_factor ema_weight",  # where the update moves the weight away from zero; of the weight in its average
)


@triton.jit
def update_element(
    param, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, scalars, AMSGRAD: tl.constexpr, CAUTIOUS: tl.constexpr
):  # fmt: skip
    grad = scalars.grad_scale * grad + tl.where(scalars.l2 != 0, scalars.l2 * param, 0.0)
    # As torch's lerp: where the gradient has the larger weight, m + (1 - beta1)(g - m) would lose a small one.
    exp_avg = tl.where(scalars.from_grad, grad, exp_avg) + scalars.exp_avg_slope * (grad - exp_avg)
    exp_avg_sq = scalars.beta2 * exp_avg_sq + scalars.one_minus_beta2 * grad * grad
    averaged = exp_avg_sq
    if AMSGRAD:
        max_exp_avg_sq = larger(max_exp_avg_sq, exp_avg_sq)
        averaged = max_exp_avg_sq
    root = square_root(averaged)
    denom = root * scalars.inv_sqrt_bias_correction2 + scalars.eps
    decay_factor = scalars.decay_factor
    if CAUTIOUS:
        # The update has the sign of exp_avg. Both signs are asked for: the product of two small numbers would be zero.
        towards_zero = tl.where(param < 0, -exp_avg, exp_avg)
        decay_factor = tl.where(towards_zero >= 0, decay_factor, scalars.opposed_decay_factor)
    param = decay_factor * param - quotient(scalars.step_size * exp_avg, denom)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq, averaged, root


@triton.jit
def next_average(ema_param, param, scalars):
    """The exponential average of a weight, `param` as its update leaves it."""
    return ema_param + scalars.ema_weight * (param - ema_param)


@triton.jit
def next_max(grad, exp_avg_sq, max_exp_avg_sq, scalars):
    """max_exp_avg_sq as an update will leave it."""
    grad_scale, beta2, one_minus_beta2 = scalars
    grad *= grad_scale
    return larger(max_exp_avg_sq, beta2 * exp_avg_sq + one_minus_beta2 * grad * grad)


@triton.jit
def larger(a, b):
    """Keeps a NaN of b, as torch.maximum does."""
    return tl.where(a >= b, a, b)


# Rounded as IEEE 754 says: four times the instructions of the approximations, in a kernel that waits for memory.
# Operators on float64 are so anyway.


@triton.jit
def square_root(x):
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def quotient(x, y):
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)
