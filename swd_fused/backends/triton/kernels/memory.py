"""Tensors as blocks, reached through addresses in tables."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.tables import CODEC, HYPER, SEGMENT, TENSOR

# Of a program. Blocks are so long that each has 128 bits of the widest operand.
THREADS = tl.constexpr(128)

# Pointers to what each pass reads about tensors and programs.
Tables = namedtuple("Tables", "steps tensors segments program_segments hyper")

# A stretch of a tensor: the tensor's index, pointers to its rows in the tables, its first element and their number.
Segment = namedtuple("Segment", "tensor row codec_row hyper_row start count")

# Pointers to a segment's first elements. `weight` is what is updated: masters, what these are beside bfloat16
# parameters, or parameters themselves.
Operands = namedtuple("Operands", "param weight exp_avg exp_avg_sq max_exp_avg_sq ema_param grad")


@triton.jit
def segments_of_program(tables):
    """The first one, and the end of them."""
    first = tables.program_segments + tl.program_id(0)
    return tl.load(first), tl.load(first + 1)


@triton.jit
def segment_at(tables, index):
    place = tables.segments + index * SEGMENT.columns
    tensor = tl.load(place + SEGMENT.tensor)
    row = tables.tensors + tensor * TENSOR.columns
    codec_row = tables.tensors - (tensor + 1) * CODEC.columns
    hyper_row = tables.hyper + tl.load(row + TENSOR.group) * HYPER.columns
    start, count = tl.load(place + SEGMENT.start), tl.load(place + SEGMENT.length).to(tl.int32)
    return Segment(tensor, row, codec_row, hyper_row, start, count)


@triton.jit
def elements(row, COLUMN: tl.constexpr, start, DTYPE: tl.constexpr):
    return tl.load(row + COLUMN).to(tl.pointer_type(DTYPE)) + start


@triton.jit
def operands_of(segment, CONFIG: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr):
    row, start = segment.row, segment.start
    param = elements(row, TENSOR.param, start, CONFIG.param)
    AVERAGE: tl.constexpr = tl.float64 if CONFIG.param == tl.float64 else tl.float32  # state.averages.average_dtype
    return Operands(
        param,
        elements(row, TENSOR.master, start, CONFIG.weight) if CONFIG.master else param,
        elements(row, TENSOR.exp_avg, start, EXP_AVG),
        elements(row, TENSOR.exp_avg_sq, start, EXP_AVG_SQ),
        elements(row, TENSOR.max_exp_avg_sq, start, CONFIG.averaged),
        elements(row, TENSOR.ema_param, start, AVERAGE) if CONFIG.averages else param,
        elements(row, TENSOR.grad, start, CONFIG.grad),
    )


# 128-bit accesses need a hint that pointers are aligned, in the very function that adds the offsets: on an address it
# is lost in the cast, and on the argument of a function when that is inlined.


@triton.jit
def load_block(tensor, offsets, count, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """A whole block, aligned to VECTOR elements; with VECTOR of 0, what is below `count`, and zeros."""
    if VECTOR > 0:
        block = tl.load(tl.multiple_of(tensor + offsets, tensor.dtype.element_ty.primitive_bitwidth // 8 * VECTOR))
    else:
        block = tl.load(tensor + offsets, mask=offsets < count, other=0)
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
