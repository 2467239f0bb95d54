"""The AdamS update of one element: the only place in Triton where the mathematics stand."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update_element(
    param, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2,
    inv_sqrt_bias_correction2, eps, decay_factor, step_size, AMSGRAD: tl.constexpr,
):  # fmt: skip
    grad = grad_scale * grad + tl.where(l2 != 0, l2 * param, 0.0)
    # As torch's lerp: where the gradient has the larger weight, m + (1 - beta1)(g - m) would lose a small one.
    exp_avg = tl.where(from_grad, grad, exp_avg) + exp_avg_slope * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad
    averaged = exp_avg_sq
    if AMSGRAD:
        max_exp_avg_sq = larger(max_exp_avg_sq, exp_avg_sq)
        averaged = max_exp_avg_sq
    root = square_root(averaged)
    denom = root * inv_sqrt_bias_correction2 + eps
    param = decay_factor * param - quotient(step_size * exp_avg, denom)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq, averaged, root


@triton.jit
def larger(a, b):
    """Keeps a NaN of b, as torch.maximum does."""
    return tl.where(a >= b, a, b)


# Rounded as IEEE 754 says: four times the instructions of the approximations, in a kernel that waits for memory.
# Operators on float64 are so anyway.


@triton.jit
def square_root(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def quotient(x, y):
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)
