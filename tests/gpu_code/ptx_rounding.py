"""Fused multiply-add with one rounding, on NumPy arrays.

A product of two fp32, bf16 or fp16 numbers is exact in float64. Its sum with the third is not: rounding it to float64
and then to fp32 would be wrong about once in 2^29. So the sum is rounded to odd (toward zero, last bit set if anything
was lost), after which the second rounding is the only one that shows (Boldo and Melquiond, 2008). In fp64 the product
is split into two numbers by Dekker's method and the same trick is used once more.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from .ptx_types import Array

LARGEST, SMALLEST = 2.0**990, 2.0**-960  # between these no intermediate of Dekker's product over- or underflows


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c. fp32 and narrower give float64 that is rounded to odd; the caller's rounding makes the result."""
    if a.dtype == np.float64:
        return fma_float64(a, b, c)
    return add_round_to_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its exact error."""
    total = a + b
    from_b = total - a
    return total, (a - (total - from_b)) + (b - from_b)


def add_round_to_odd(a: Array, b: Array) -> Array:
    total, error = two_sum(a, b)
    lost = (error != 0) & np.isfinite(total) & np.isfinite(error)
    if not lost.any():
        return total
    bits = np.ascontiguousarray(total).view(np.uint64) - (lost & ((error < 0) != (total < 0))).astype(np.uint64)
    return (bits | lost.astype(np.uint64)).view(np.float64)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded product and its exact error."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(x: Array) -> tuple[Array, Array]:
    scaled = 134217729.0 * x  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def fma_float64(a: Array, b: Array, c: Array) -> Array:
    a, b, c = np.broadcast_arrays(a, b, c)
    product, product_error = two_product(a, b)
    low_sum, low_error = two_sum(c, product_error)
    high_sum, high_error = two_sum(product, low_sum)
    result = high_sum + add_round_to_odd(low_error, high_error)
    magnitudes = np.abs(np.stack([a, b, a * b, c]))
    finite = np.isfinite(np.stack([a, b, c])).all(0)
    easy = ((magnitudes == 0) | ((magnitudes > SMALLEST) & (magnitudes < LARGEST))).all(0) & (a * b != 0)
    result = np.where(finite & easy, result, a * b + c)
    for i in np.flatnonzero(finite & ~easy & (a != 0) & (b != 0)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        result[i] = _nearest_float64(exact)
    return result


def _nearest_float64(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")
