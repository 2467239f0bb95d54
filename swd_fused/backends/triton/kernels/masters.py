"""Masters in two bytes, see csrc/masters.h: bfloat16 parameters, and what their float32 masters are beside them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined_master(param, remainder):
    """The master in float32, from the bits of the parameter and the remainder, both as int32. A remainder that would
    make NaN of the parameter, since somebody has written to that, counts as 0."""
    bits = param << 16
    master = (bits + remainder).to(tl.float32, bitcast=True)
    return tl.where(master != master, bits.to(tl.float32, bitcast=True), master)


@triton.jit
def split_master(master):
    """The parameter, as a float32 number that bfloat16 can hold, and the remainder. NaN has none, or rounding up might
    give -0."""
    master = master.to(tl.float32)
    bits = master.to(tl.int32, bitcast=True)
    bits = tl.where(master != master, 0x7FC00000, bits)
    return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True), bits.to(tl.int16)
