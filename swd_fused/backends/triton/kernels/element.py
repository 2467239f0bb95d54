"""The AdamS update of one element: the only place in Triton with the mathematics."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

# The arguments of an update besides its operands, the same for all elements of a segment.
Scalars = namedtuple(
    "Scalars",
    "grad_scale l2 inv_sqrt_bias_correction2 eps decay_factor step_size from_grad exp_avg_slope beta2 one_minus_beta2 "
    "opposed_decay_factor ema_weight",  # decay where the update moves away from zero; share in the average
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
        # The update subtracts a number of exp_avg's sign. Signs are compared: a product of small numbers may be zero.
        towards_zero = tl.where(param < 0, -exp_avg, exp_avg)
        decay_factor = tl.where(towards_zero >= 0, decay_factor, scalars.opposed_decay_factor)
    param = decay_factor * param - quotient(scalars.step_size * exp_avg, denom)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq, averaged, root


@triton.jit
def next_average(ema_param, param, scalars):
    """Returns the exponential average of a weight, given `param` after its update."""
    return ema_param + scalars.ema_weight * (param - ema_param)


@triton.jit
def next_max(grad, exp_avg_sq, max_exp_avg_sq, scalars):
    """Returns max_exp_avg_sq as an update will leave it."""
    grad_scale, beta2, one_minus_beta2 = scalars
    grad *= grad_scale
    return larger(max_exp_avg_sq, beta2 * exp_avg_sq + one_minus_beta2 * grad * grad)


@triton.jit
def larger(a, b):
    """Returns the larger number, or a NaN of b, as torch.maximum does."""
    return tl.where(a >= b, a, b)


# These round as IEEE 754 says: four times the instructions of the approximations, in a kernel that waits for memory.
# Operators on float64 always do so.


@triton.jit
def square_root(x):
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def quotient(x, y):
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)
