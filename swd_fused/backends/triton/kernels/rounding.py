"""Conversion of float32 weights to bfloat16: by stochastic rounding, or with a remainder in two more bytes.

The bits of stochastic rounding come from a hash of seed, tensor, step and element number. csrc/masters.h explains the
remainders, which complete bfloat16 parameters to float32 masters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.tables import TENSOR

# More than a segment has elements: longer rows count as this long, since they end after the segment in any case.
LONG_ROW = tl.constexpr(1 << 30)


@triton.jit
def scrambled(x):
    """Applies the finaliser of MurmurHash3 to uint32 numbers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def rounding_key(rounding_start, segment, step):
    """Returns the tensor's key in this step."""
    key = scrambled(rounding_start.to(tl.uint32) + tl.load(segment.row + TENSOR.number).to(tl.uint32))
    return scrambled(key + step.to(tl.uint32))


@triton.jit
def moment_key(rounding_start, segment, step):
    """Returns the tensor's key in this step for rounding moments in 8 bits."""
    return scrambled(rounding_key(rounding_start, segment, step) + 1)


@triton.jit
def segment_rounding(rounding_start, segment, step):
    """Returns the tensor's key in this step, and the arguments of `element_numbers` for a segment."""
    key = rounding_key(rounding_start, segment, step)
    length, pitch = tl.load(segment.row + TENSOR.row_length), tl.load(segment.row + TENSOR.row_pitch)
    row, column = segment.start // length, segment.start % length
    first = tl.load(segment.row + TENSOR.first_number) + row * pitch + column
    left_in_row = tl.minimum(length - column, LONG_ROW).to(tl.int32)
    return key, first, left_in_row, tl.minimum(length, LONG_ROW).to(tl.int32), pitch - length


@triton.jit
def element_numbers(first, left_in_row, row_length, gap, offsets):
    """Returns 64-bit numbers of elements, which skip `gap` between rows. Divides in 32 bits, which is much faster."""
    rows = tl.where(offsets < left_in_row, 0, 1 + (offsets - left_in_row) // row_length)
    return first + offsets + rows * gap


@triton.jit
def stochastically_rounded(values, rounding, offsets):
    """Rounds to float32 values that bfloat16 can hold. The bits cut off are the probability of rounding up."""
    key, first, left_in_row, row_length, gap = rounding
    numbers = element_numbers(first, left_in_row, row_length, gap, offsets)
    values = values.to(tl.float32)
    keys = key + scrambled((numbers >> 32).to(tl.uint32))
    noise = scrambled(keys ^ (numbers.to(tl.uint32) * 0x9E3779B9)) >> 16
    return rounded_by(values, noise)


@triton.jit
def stochastically_rounded_in_blocks(values, rounding, offset, inside):
    """Rounds a tile of blocks likewise, given their offsets and each element's place in its block. A block is within a
    row, so all numbers follow from its first one; the higher 32 bits may change once."""
    key, first, left_in_row, row_length, gap = rounding
    number = element_numbers(first, left_in_row, row_length, gap, offset)
    low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
    before, behind = key + scrambled(high), key + scrambled(high + 1)
    lows = low[None, :, None] + inside.to(tl.uint32)
    keys = tl.where(lows < low[None, :, None], behind[None, :, None], before[None, :, None])
    return rounded_by(values.to(tl.float32), scrambled(keys ^ (lows * 0x9E3779B9)) >> 16)


@triton.jit
def rounded_by(values, noise):
    bits = values.to(tl.uint32, bitcast=True)
    rounded = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, rounded, values)


# --- Masters in two bytes


@triton.jit
def joined_master(param, remainder):
    """Returns the master in float32, from the bits of the parameter and the remainder, both as int32. A remainder that
    gives NaN counts as 0: the parameter was written to from outside."""
    bits = param << 16
    master = (bits + remainder).to(tl.float32, bitcast=True)
    return tl.where(master != master, bits.to(tl.float32, bitcast=True), master)


@triton.jit
def split_master(master):
    """Returns the parameter, as a float32 number that bfloat16 can hold, and the remainder. All NaNs become one, since
    some would round up to -0."""
    master = master.to(tl.float32)
    bits = master.to(tl.int32, bitcast=True)
    bits = tl.where(master != master, 0x7FC00000, bits)
    return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True), bits.to(tl.int16)
