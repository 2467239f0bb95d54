"""Moments in 8 bits, as state/eight_bit.py defines them: blocks of codes with a scale, several in a tile at once.

A tile has the shape [256 / width, blocks, width], where a warp's threads together have `width` neighbours. So a block
is within one warp, each of its accesses is one stretch of memory, and a block's maximum needs no shared memory. If
elements are not aligned two warps share a block, since single accesses take more registers.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.element import quotient
from swd_fused.backends.triton.kernels.rounding import scrambled
from swd_fused.backends.triton.kernels.tables import TENSOR, Tile, elements, is_aligned, load, operands_of
from swd_fused.state import eight_bit

BLOCK_LENGTH = tl.constexpr(eight_bit.BLOCK)
FRACTION_BITS = tl.constexpr(eight_bit.FRACTION_BITS)
UNIT = tl.constexpr(2.0**eight_bit.FRACTION_BITS)
LEAST_SCALE = tl.constexpr(eight_bit.LEAST_SCALE)
LARGEST_CODE = tl.constexpr(eight_bit.LARGEST_CODE["exp_avg"])
LARGEST_ROOT_CODE = tl.constexpr(eight_bit.LARGEST_CODE["exp_avg_sq"])

# Adding this to a float32 number below 2^22 leaves no bits for a fraction: it rounds to nearest, ties to even.
ROUNDER = tl.constexpr(1.5 * 2**23)
ROUNDER_BITS = tl.constexpr(0x4B400000)


# A segment's blocks: how many there are, the first one's place in its row and among all, how many a row has, and how
# long a row's last one is; the first one's number for rounding, and how many numbers are left out between rows.
Blocks = namedtuple("Blocks", "count in_row first per_row tail number gap")

# Pointers to the scales of a segment's blocks.
Scales = namedtuple("Scales", "exp_avg exp_avg_sq")

# If rows are a multiple of this, all are aligned if the first one is: 16 bytes of the narrowest operand that is read in
# 128 bits, 16-bit gradients.
ROW_ALIGNMENT = tl.constexpr(8)

# How many neighbours in a tile a warp has (on AMD, half a warp) for each element in an access; and how many blocks are
# taken at once, a multiple of a program's warps.
LANES, BLOCKS_IN_FLIGHT = tl.constexpr(32), tl.constexpr(4)

# The same if elements are not aligned: how many neighbours two warps have, and how many blocks are taken at once.
UNALIGNED_WIDTH, UNALIGNED_BLOCKS = tl.constexpr(64), tl.constexpr(2)


@triton.jit
def is_in_vectors(segment):
    """Returns whether all rows of a segment begin aligned and end with a whole vector. A vector's only row may not."""
    return is_aligned(segment) & (segment.count % ROW_ALIGNMENT == 0)


@triton.jit
def has_codes(segment):
    """Returns whether the tensor's moments are kept in 8 bits."""
    return tl.load(segment.row + TENSOR.blocks_per_row) != 0


@triton.jit
def coded_operands_of(segment, CONFIG: tl.constexpr):
    """Returns pointers to a segment's elements and codes, pointers to its blocks' scales, and the blocks."""
    blocks = segment_blocks(segment)
    exp_avg = elements(segment.row, TENSOR.exp_avg_scales, blocks.first, tl.float32)
    exp_avg_sq = elements(segment.row, TENSOR.exp_avg_sq_scales, blocks.first, tl.float32)
    return operands_of(segment, CONFIG, tl.int8, tl.uint8), Scales(exp_avg, exp_avg_sq), blocks


@triton.jit
def segment_blocks(segment):
    """Returns a segment's blocks. Segments begin and end between blocks."""
    tensor, start = segment.row, segment.start
    row_length, per_row = tl.load(tensor + TENSOR.code_row_length), tl.load(tensor + TENSOR.blocks_per_row)
    row, end_row = start // row_length, (start + segment.count) // row_length
    in_row = (start - row * row_length) // BLOCK_LENGTH
    first = row * per_row + in_row
    end = end_row * per_row + (start + segment.count - end_row * row_length) // BLOCK_LENGTH
    tail = row_length - (per_row - 1) * BLOCK_LENGTH
    pitch = tl.load(tensor + TENSOR.block_pitch)
    number = tl.load(tensor + TENSOR.first_block) + row * pitch + in_row
    count, gap = (end - first).to(tl.int32), (pitch - per_row).to(tl.int32)
    return Blocks(count, in_row.to(tl.int32), first, per_row.to(tl.int32), tail.to(tl.int32), number, gap)


@triton.jit
def tile_at(begin, blocks, WIDTH: tl.constexpr, VECTOR: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns a tile: each block's offset, index and row, counted from the segment's beginning, and each element's
    place in its block, with a mask of those that exist."""
    inside = tl.arange(0, BLOCK_LENGTH // WIDTH)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    block = begin + tl.arange(0, BLOCKS)
    row = (blocks.in_row + block) // blocks.per_row
    is_last_of_row = blocks.in_row + block - row * blocks.per_row == blocks.per_row - 1
    length = tl.where(block < blocks.count, tl.where(is_last_of_row, blocks.tail, BLOCK_LENGTH), 0)
    offset = block * BLOCK_LENGTH - row * (BLOCK_LENGTH - blocks.tail)
    # If a tensor is taken in vectors, its rows are multiples of a vector.
    mask = tl.max_constancy(inside < length[None, :, None], [1, 1, VECTOR])
    return Tile(offset, inside, mask, block, row)


@triton.jit
def load_scales(scales, tile, blocks):
    return tl.load(scales + tile.block, mask=tile.block < blocks.count, other=0.0)


@triton.jit
def decoded(codes, scales, tile, blocks, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    return load(codes, tile, COMPUTE, VECTOR) * load_scales(scales, tile, blocks)[None, :, None]


@triton.jit
def tile_noise(key, blocks, tile):
    """Returns 8 random bits for each moment. Two neighbours share a hash, whose key is the same in a whole block."""
    number = blocks.number + tile.block + tile.row.to(tl.int64) * blocks.gap
    keys = key + scrambled((number >> 25).to(tl.uint32))
    pairs = (number * (BLOCK_LENGTH // 2)).to(tl.uint32)[None, :, None] + (tile.inside // 2).to(tl.uint32)
    bits = scrambled(keys[None, :, None] ^ (pairs * 0x9E3779B9)) >> (tile.inside % 2 * 16).to(tl.uint32)
    return (bits & 0xFF).to(tl.int32), (bits >> 8 & 0xFF).to(tl.int32)


@triton.jit
def encoded(values, noise, SIGNED: tl.constexpr):
    """Returns the codes, in 32 bits, and the scales of a tile's blocks.

    The largest value is found by comparing bit patterns, among which NaN is the largest. Blocks that have no inverse,
    since they are zero or not finite, have the least code: 0 if SIGNED, else 1. Values come in float64 if maxima are
    loaded in float64.
    """
    LARGEST: tl.constexpr = LARGEST_CODE if SIGNED else LARGEST_ROOT_CODE
    values = values.to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scales = tl.max(tl.max(bits, axis=0), axis=1).to(tl.float32, bitcast=True) * (1 / LARGEST)
    inverse = tl.where(scales > LEAST_SCALE, quotient(tl.full(scales.shape, UNIT, tl.float32), scales), 0.0)
    fixed = (values * inverse[None, :, None] + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    codes = fixed + noise >> FRACTION_BITS
    if SIGNED:
        limit = tl.where(inverse > 0, LARGEST, 0)[None, :, None]
        codes = tl.maximum(codes, -limit)
    else:
        limit = tl.where(inverse > 0, LARGEST, 1)[None, :, None]
        codes = tl.maximum(codes, 1)
    return tl.minimum(codes, limit), scales


@triton.jit
def sums_of_blocks(root_codes, scales, mask):
    """Returns each block's sum of second moments as they are stored: exact but for one rounding."""
    squares = tl.sum(tl.sum(tl.where(mask, root_codes * root_codes, 0), axis=0), axis=1)
    scales = scales.to(tl.float64)
    return squares.to(tl.float64) * (scales * scales)
