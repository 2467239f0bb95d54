"""Tensors as blocks, reached through addresses."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.tables import CODEC, HYPER, SEGMENT, TENSOR

# Of a program. Blocks are so long that each has 128 bits of the widest operand.
THREADS = tl.constexpr(128)

# 128-bit accesses need a hint that pointers are aligned, in the very function that adds the offsets: on an address it
# is lost in the cast, and on the argument of a function when that is inlined.


@triton.jit
def load_block(tensor, offsets, count, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """A whole block, aligned to VECTOR elements; with VECTOR of 0, what is below `count`, and zeros."""
    if VECTOR > 0:
        block = tl.load(tl.multiple_of(tensor + offsets, tensor.dtype.element_ty.primitive_bitwidth // 8 * VECTOR))
    else:
        block = tl.load(tensor + offsets, mask=offsets < count, other=0.0)
    return block.to(COMPUTE)


@triton.jit
def load_pairs(words, offsets, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """Two blocks of 16-bit numbers, from aligned 32-bit words: 128 bits for each thread, and for sums of them no more
    registers than in float32."""
    pairs = tl.load(tl.multiple_of(words + offsets, 16))
    low, high = pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)
    return low.to(DTYPE, bitcast=True).to(COMPUTE), high.to(DTYPE, bitcast=True).to(COMPUTE)


@triton.jit
def store_block(tensor, block, offsets, count, VECTOR: tl.constexpr):
    block = block.to(tensor.dtype.element_ty)
    if VECTOR > 0:
        tl.store(tl.multiple_of(tensor + offsets, tensor.dtype.element_ty.primitive_bitwidth // 8 * VECTOR), block)
    else:
        tl.store(tensor + offsets, block, mask=offsets < count)


@triton.jit
def elements(tensor_row, COLUMN: tl.constexpr, start, DTYPE: tl.constexpr):
    """A pointer to a segment's first element."""
    return tl.load(tensor_row + COLUMN).to(tl.pointer_type(DTYPE)) + start


@triton.jit
def segment_of(tensors, segments, hyper, segment):
    row = segments + segment * SEGMENT.columns
    tensor = tl.load(row + SEGMENT.tensor)
    tensor_row = tensors + tensor * TENSOR.columns
    hyper_row = hyper + tl.load(tensor_row + TENSOR.group) * HYPER.columns
    return tensor, tensor_row, hyper_row, tl.load(row + SEGMENT.start), tl.load(row + SEGMENT.length).to(tl.int32)


@triton.jit
def codec_of(tensors, tensor):
    return tensors - (tensor + 1) * CODEC.columns
