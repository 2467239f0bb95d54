"""Rounding to bfloat16 by chance. The bits come from a hash of seed, tensor, step and element."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scrambled(x):
    """The finaliser of MurmurHash3 on uint32 numbers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def rounding_key(rounding_start, tensor_id, step, start):
    """For a segment, with what numbers its elements: the tensor's key in this step, and the segment's start."""
    key = scrambled(rounding_start.to(tl.uint32) + tensor_id.to(tl.uint32))
    key = scrambled(key + step.to(tl.uint32))
    return key + scrambled((start >> 32).to(tl.uint32)), start.to(tl.uint32)


@triton.jit
def stochastically_rounded(values, key_and_first, offsets):
    """As float32 values that bfloat16 can hold: what is cut off is how likely it is to round up."""
    key, first = key_and_first
    values = values.to(tl.float32)
    noise = scrambled(key ^ ((first + offsets.to(tl.uint32)) * 0x9E3779B9)) >> 16
    bits = values.to(tl.uint32, bitcast=True)
    rounded = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, rounded, values)
