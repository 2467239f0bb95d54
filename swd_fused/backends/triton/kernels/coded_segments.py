"""What each pass does with one segment of a tensor whose moments are kept in 8 bits.

Segments are walked in tiles of blocks: in vectors where the tensor is aligned, else element by element.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels import eight_bit
from swd_fused.backends.triton.kernels.eight_bit import BLOCK_LENGTH, Tiling
from swd_fused.backends.triton.kernels.element import next_average, next_max, square_root, update_element
from swd_fused.backends.triton.kernels.masters import joined_master, split_master
from swd_fused.backends.triton.kernels.memory import elements, operands_of
from swd_fused.backends.triton.kernels.rounding import moment_key, segment_rounding, stochastically_rounded_in_blocks
from swd_fused.backends.triton.kernels.segments import next_max_scalars, segment_scalars
from swd_fused.backends.triton.kernels.tables import CODEC, LIMIT, TENSOR

# Rows that are a multiple of it are aligned if the first one is: 16 bytes of the narrowest operand that is read in 128
# bits, 16-bit gradients.
ROW_ALIGNMENT = tl.constexpr(8)

# Neighbours in a tile that a warp has, for each element in an access; on AMD, half a warp.
LANES = tl.constexpr(32)

# How many blocks are taken at once, a multiple of a program's warps.
BLOCKS_IN_FLIGHT = tl.constexpr(4)

# The same where elements are not aligned: neighbours of two warps, and blocks.
UNALIGNED_WIDTH = tl.constexpr(64)
UNALIGNED_BLOCKS = tl.constexpr(2)

# Pointers to the scales of a segment's blocks.
Scales = namedtuple("Scales", "exp_avg exp_avg_sq")


@triton.jit
def is_in_vectors(segment):
    """Whether all rows of a segment begin aligned and end with a whole vector. A vector's only row may not."""
    return (tl.load(segment.row + TENSOR.aligned) != 0) & (segment.count % ROW_ALIGNMENT == 0)


@triton.jit
def scales_of(segment, blocks):
    exp_avg = elements(segment.codec_row, CODEC.exp_avg_scales, blocks.first, tl.float32)
    return Scales(exp_avg, elements(segment.codec_row, CODEC.exp_avg_sq_scales, blocks.first, tl.float32))


@triton.jit
def update_coded_segment(
    segment, sums_row, step, grad_factor, limits, CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr
):  # fmt: skip
    """Returns what `segments.update_segment` does."""
    rounding_start = tl.load(limits + LIMIT.rounding_start)
    scalars = segment_scalars(segment, sums_row, step, grad_factor, CONFIG)
    blocks = eight_bit.segment_blocks(segment)
    operands, scales = operands_of(segment, CONFIG, tl.int8, tl.uint8), scales_of(segment, blocks)
    key = moment_key(rounding_start, segment, step)
    rounding = segment_rounding(rounding_start, segment, step) if CONFIG.stochastic else 0
    if is_in_vectors(segment):
        total, squares = update_tiles(
            operands, scales, blocks, key, rounding, scalars, CONFIG, SUM_GRADS,
            Tiling(LANES * CONFIG.vector, CONFIG.vector, BLOCKS_IN_FLIGHT),
        )  # fmt: skip
    else:
        total, squares = update_tiles(
            operands, scales, blocks, key, rounding, scalars, CONFIG, SUM_GRADS,
            Tiling(UNALIGNED_WIDTH, 1, UNALIGNED_BLOCKS),
        )  # fmt: skip
    return total, squares


@triton.jit
def update_tiles(
    operands, scales, blocks, key, rounding, scalars, CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr, TILING
):  # fmt: skip
    total = tl.zeros([TILING.BLOCKS], tl.float64)
    grad_total = tl.zeros([TILING.BLOCKS, TILING.WIDTH], CONFIG.compute)
    end = (blocks.count + TILING.BLOCKS - 1) // TILING.BLOCKS * TILING.BLOCKS
    for back in range(TILING.BLOCKS, end + TILING.BLOCKS, TILING.BLOCKS):
        tile = eight_bit.tile_at(end - back, blocks, TILING)
        averaged, squares = update_tile(
            operands, scales, tile, blocks, key, rounding, scalars, CONFIG, SUM_GRADS, TILING.VECTOR
        )
        total += averaged
        if SUM_GRADS:
            grad_total += squares
    return tl.sum(total), tl.sum(grad_total.to(tl.float64))


@triton.jit
def update_tile(
    operands, scales, tile, blocks, key, rounding, scalars,
    CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Returns by block the sum of the second moments whose mean is the schedule, as they are stored, and grad^2 added
    within threads, at once, or gradients would take registers to the end."""
    g = eight_bit.load_tile(operands.grad, tile, CONFIG.compute, VECTOR)
    if CONFIG.weight == tl.int16:
        bits = eight_bit.load_tile(operands.param.to(tl.pointer_type(tl.int16)), tile, tl.int32, VECTOR)
        p = joined_master(bits, eight_bit.load_tile(operands.weight, tile, tl.int32, VECTOR)).to(CONFIG.compute)
    else:
        p = eight_bit.load_tile(operands.weight, tile, CONFIG.compute, VECTOR)
    m = eight_bit.decoded(operands.exp_avg, scales.exp_avg, tile, blocks, CONFIG.compute, VECTOR)
    root = eight_bit.decoded(operands.exp_avg_sq, scales.exp_avg_sq, tile, blocks, CONFIG.compute, VECTOR)
    v = root * root
    largest = v
    if CONFIG.amsgrad:
        largest = eight_bit.load_tile(operands.max_exp_avg_sq, tile, CONFIG.compute, VECTOR)
    if CONFIG.averages:
        e = eight_bit.load_tile(operands.ema_param, tile, CONFIG.compute, VECTOR)
    squares = tl.sum(g * g, axis=0) if SUM_GRADS else 0
    p, m, v, largest, averaged, root = update_element(p, m, v, largest, g, scalars, CONFIG.amsgrad, CONFIG.cautious)
    if CONFIG.averages:
        eight_bit.store_tile(operands.ema_param, next_average(e, p, scalars), tile, VECTOR)
    if CONFIG.weight == tl.int16:
        p, remainder = split_master(p)
        eight_bit.store_tile(operands.weight, remainder, tile, VECTOR)
    elif CONFIG.master:
        eight_bit.store_tile(operands.weight, p, tile, VECTOR)
    if CONFIG.stochastic:
        p = stochastically_rounded_in_blocks(p, rounding, tile.offset, tile.inside)
    eight_bit.store_tile(operands.param, p, tile, VECTOR)
    if CONFIG.amsgrad:
        eight_bit.store_tile(operands.max_exp_avg_sq, largest, tile, VECTOR)
        root = square_root(v)
    noise, root_noise = eight_bit.tile_noise(key, blocks, tile)
    m, new_scales = eight_bit.encoded(m, noise, True)
    v, new_root_scales = eight_bit.encoded(root, root_noise, False)
    eight_bit.store_tile(operands.exp_avg, m, tile, VECTOR)
    eight_bit.store_tile(operands.exp_avg_sq, v, tile, VECTOR)
    tl.store(scales.exp_avg + tile.block, new_scales, mask=tile.block < blocks.count)
    tl.store(scales.exp_avg_sq + tile.block, new_root_scales, mask=tile.block < blocks.count)
    if CONFIG.amsgrad:
        sums = tl.sum(tl.sum(averaged, axis=0), axis=1).to(tl.float64)
    else:
        sums = eight_bit.sums_of_blocks(v, new_root_scales, tile.mask)
    return sums, squares


@triton.jit
def sum_of_coded(segment, CONFIG: tl.constexpr):
    """In the order in which `update_coded_segment` adds, so the result has the same bits."""
    blocks = eight_bit.segment_blocks(segment)
    operands, scales = operands_of(segment, CONFIG, tl.int8, tl.uint8), scales_of(segment, blocks)
    if is_in_vectors(segment):
        total = sum_of_tiles(
            operands, scales, blocks, CONFIG, Tiling(LANES * CONFIG.vector, CONFIG.vector, BLOCKS_IN_FLIGHT)
        )
    else:
        total = sum_of_tiles(operands, scales, blocks, CONFIG, Tiling(UNALIGNED_WIDTH, 1, UNALIGNED_BLOCKS))
    return total


@triton.jit
def sum_of_tiles(operands, scales, blocks, CONFIG: tl.constexpr, TILING):
    total = tl.zeros([TILING.BLOCKS], tl.float64)
    end = (blocks.count + TILING.BLOCKS - 1) // TILING.BLOCKS * TILING.BLOCKS
    for back in range(TILING.BLOCKS, end + TILING.BLOCKS, TILING.BLOCKS):
        tile = eight_bit.tile_at(end - back, blocks, TILING)
        if CONFIG.amsgrad:
            averaged = eight_bit.load_tile(operands.max_exp_avg_sq, tile, CONFIG.compute, TILING.VECTOR)
            total += tl.sum(tl.sum(averaged, axis=0), axis=1).to(tl.float64)
        else:
            codes = eight_bit.load_tile(operands.exp_avg_sq, tile, tl.int32, TILING.VECTOR)
            total += eight_bit.sums_of_blocks(codes, eight_bit.load_scales(scales.exp_avg_sq, tile, blocks), tile.mask)
    return tl.sum(total)


@triton.jit
def sum_of_next_max_coded(segment, grad_factor, CONFIG: tl.constexpr):
    """Returns what `segments.sum_of_next_max` does."""
    blocks = eight_bit.segment_blocks(segment)
    operands, scales = operands_of(segment, CONFIG, tl.int8, tl.uint8), scales_of(segment, blocks)
    scalars = next_max_scalars(segment, grad_factor, CONFIG.compute)
    if is_in_vectors(segment):
        total = sum_of_next_max_tiles(
            operands, scales, blocks, scalars, CONFIG, Tiling(LANES * CONFIG.vector, CONFIG.vector, BLOCKS_IN_FLIGHT)
        )
    else:
        total = sum_of_next_max_tiles(
            operands, scales, blocks, scalars, CONFIG, Tiling(UNALIGNED_WIDTH, 1, UNALIGNED_BLOCKS)
        )
    return total


@triton.jit
def sum_of_next_max_tiles(operands, scales, blocks, scalars, CONFIG: tl.constexpr, TILING):
    total = tl.zeros([BLOCK_LENGTH // TILING.WIDTH, TILING.BLOCKS, TILING.WIDTH], CONFIG.compute)
    for begin in range(0, blocks.count, TILING.BLOCKS):
        tile = eight_bit.tile_at(begin, blocks, TILING)
        grad = eight_bit.load_tile(operands.grad, tile, CONFIG.compute, TILING.VECTOR)
        root = eight_bit.decoded(operands.exp_avg_sq, scales.exp_avg_sq, tile, blocks, CONFIG.compute, TILING.VECTOR)
        maximum = eight_bit.load_tile(operands.max_exp_avg_sq, tile, CONFIG.compute, TILING.VECTOR)
        total += next_max(grad, root * root, maximum, scalars)
    return tl.sum(total.to(tl.float64))
