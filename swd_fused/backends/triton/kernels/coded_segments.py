"""What each pass does with one segment of a tensor whose moments are kept in 8 bits.

Segments are walked in tiles of blocks: in vectors where the tensor is aligned, else element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.eight_bit import (
    BLOCK_LENGTH,
    LARGEST_CODE,
    LARGEST_ROOT_CODE,
    encoded,
    load_scales,
    load_tile,
    segment_blocks,
    store_tile,
    sums_of_blocks,
    tile_at,
    tile_noise,
)
from swd_fused.backends.triton.kernels.element import larger, square_root, update_element
from swd_fused.backends.triton.kernels.memory import elements
from swd_fused.backends.triton.kernels.rounding import (
    moment_key,
    segment_rounding,
    stochastically_rounded_in_blocks,
)
from swd_fused.backends.triton.kernels.segments import segment_scalars
from swd_fused.backends.triton.kernels.tables import CODEC, HYPER, TENSOR

# Rows that are a multiple of it are aligned if the first one is: 16 bytes of the narrowest operand that is read in 128
# bits, 16-bit gradients.
ROW_ALIGNMENT = tl.constexpr(8)

# Neighbours in a tile that a warp has, for each element in an access; on AMD, half a warp.
LANES = tl.constexpr(32)

# The same for two warps, and how many blocks are taken at once, of what is not aligned.
UNALIGNED_WIDTH = tl.constexpr(64)
UNALIGNED = tl.constexpr(2)


@triton.jit
def is_in_vectors(tensor_row, count):
    """Whether all rows of a segment begin aligned and end with a whole vector. A vector's only row may not."""
    return (tl.load(tensor_row + TENSOR.aligned) != 0) & (count % ROW_ALIGNMENT == 0)


@triton.jit
def update_coded_segment(
    tensor_row, codec_row, hyper_row, start, count, step, exp_avg_sq_mean, grad_factor, rounding_start,
    PARAM: tl.constexpr, GRAD: tl.constexpr, AVERAGED: tl.constexpr, WEIGHT: tl.constexpr, COMPUTE: tl.constexpr,
    AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, ADDS_L2: tl.constexpr,
    SUM_GRADS: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns what `segments.update_segment` does."""
    scalars = segment_scalars(hyper_row, step, exp_avg_sq_mean, grad_factor, COMPUTE, ADDS_L2)
    first, counts, number, gap = segment_blocks(codec_row, start, count)
    param = elements(tensor_row, TENSOR.param, start, PARAM)
    if MASTER:
        weight = elements(tensor_row, TENSOR.master, start, WEIGHT)
    else:
        weight = param
    operands = (
        param,
        weight,
        elements(tensor_row, TENSOR.exp_avg, start, tl.int8),
        elements(tensor_row, TENSOR.exp_avg_sq, start, tl.uint8),
        elements(codec_row, CODEC.exp_avg_scales, first, tl.float32),
        elements(codec_row, CODEC.exp_avg_sq_scales, first, tl.float32),
        elements(tensor_row, TENSOR.max_exp_avg_sq, start, AVERAGED),
        elements(tensor_row, TENSOR.grad, start, GRAD),
    )
    numbers = moment_key(rounding_start, tensor_row, step), number, gap
    if STOCHASTIC:
        rounding = segment_rounding(rounding_start, tensor_row, step, start)
    else:
        rounding = 0
    if is_in_vectors(tensor_row, count):
        total, squares = update_tiles(
            operands, counts, numbers, rounding, scalars,
            COMPUTE, AMSGRAD, MASTER, STOCHASTIC, SUM_GRADS, LANES * VECTOR, VECTOR, TILE,
        )  # fmt: skip
    else:
        total, squares = update_tiles(
            operands, counts, numbers, rounding, scalars,
            COMPUTE, AMSGRAD, MASTER, STOCHASTIC, SUM_GRADS, UNALIGNED_WIDTH, 1, UNALIGNED,
        )  # fmt: skip
    return total, squares


@triton.jit
def update_tiles(
    operands, counts, numbers, rounding, scalars,
    COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    SUM_GRADS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([TILE], tl.float64)
    grad_total = tl.zeros([TILE, WIDTH], COMPUTE)
    end = (counts[0] + TILE - 1) // TILE * TILE
    for back in range(TILE, end + TILE, TILE):
        averaged, squares = update_tile(
            operands, end - back, counts, numbers, rounding, scalars,
            COMPUTE, AMSGRAD, MASTER, STOCHASTIC, SUM_GRADS, WIDTH, VECTOR, TILE,
        )  # fmt: skip
        total += averaged
        if SUM_GRADS:
            grad_total += squares
    return tl.sum(total), tl.sum(grad_total.to(tl.float64))


@triton.jit
def update_tile(
    operands, begin, counts, numbers, rounding, scalars,
    COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    SUM_GRADS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns by block the sum of the second moments whose mean is the schedule, as they are stored, and grad^2 added
    within threads, at once, or gradients would take registers to the end."""
    param, weight, codes, root_codes, scales, root_scales, max_exp_avg_sq, grad = operands
    block, row, offset, inside, mask = tile_at(begin, counts, WIDTH, VECTOR, TILE)
    g = load_tile(grad, offset, inside, mask, COMPUTE, VECTOR)
    p = load_tile(weight, offset, inside, mask, COMPUTE, VECTOR)
    m = load_tile(codes, offset, inside, mask, COMPUTE, VECTOR) * load_scales(scales, block, counts)[None, :, None]
    root = load_tile(root_codes, offset, inside, mask, COMPUTE, VECTOR)
    root *= load_scales(root_scales, block, counts)[None, :, None]
    v = root * root
    largest = v
    if AMSGRAD:
        largest = load_tile(max_exp_avg_sq, offset, inside, mask, COMPUTE, VECTOR)
    if SUM_GRADS:
        squares = tl.sum(g * g, axis=0)
    else:
        squares = 0
    (
        grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, factor,
        step_size,
    ) = scalars  # fmt: skip
    p, m, v, largest, averaged, root = update_element(
        p, m, v, largest, g, grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2,
        inv_sqrt_bias_correction2, eps, factor, step_size, AMSGRAD,
    )  # fmt: skip
    if MASTER:
        store_tile(weight, p, offset, inside, mask, VECTOR)
    if STOCHASTIC:
        p = stochastically_rounded_in_blocks(p, rounding, offset, inside)
    store_tile(param, p, offset, inside, mask, VECTOR)
    if AMSGRAD:
        store_tile(max_exp_avg_sq, largest, offset, inside, mask, VECTOR)
        root = square_root(v)
    key, number, gap = numbers
    noise, root_noise = tile_noise(key, number, gap, block, row, inside)
    m, new_scales = encoded(m, noise, LARGEST_CODE, True)
    v, new_root_scales = encoded(root, root_noise, LARGEST_ROOT_CODE, False)
    store_tile(codes, m, offset, inside, mask, VECTOR)
    store_tile(root_codes, v, offset, inside, mask, VECTOR)
    tl.store(scales + block, new_scales, mask=block < counts[0])
    tl.store(root_scales + block, new_root_scales, mask=block < counts[0])
    if AMSGRAD:
        sums = tl.sum(tl.sum(averaged, axis=0), axis=1).to(tl.float64)
    else:
        sums = sums_of_blocks(v, new_root_scales, mask)
    return sums, squares


@triton.jit
def sum_of_coded(
    tensor_row, codec_row, start, count,
    AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """In the order in which `update_coded_segment` adds, so the result has the same bits."""
    first, counts, _, _ = segment_blocks(codec_row, start, count)
    operands = (
        elements(tensor_row, TENSOR.exp_avg_sq, start, tl.uint8),
        elements(codec_row, CODEC.exp_avg_sq_scales, first, tl.float32),
        elements(tensor_row, TENSOR.max_exp_avg_sq, start, AVERAGED),
    )
    if is_in_vectors(tensor_row, count):
        total = sum_of_tiles(operands, counts, COMPUTE, AMSGRAD, LANES * VECTOR, VECTOR, TILE)
    else:
        total = sum_of_tiles(operands, counts, COMPUTE, AMSGRAD, UNALIGNED_WIDTH, 1, UNALIGNED)
    return total


@triton.jit
def sum_of_tiles(
    operands, counts,
    COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    root_codes, root_scales, max_exp_avg_sq = operands
    total = tl.zeros([TILE], tl.float64)
    end = (counts[0] + TILE - 1) // TILE * TILE
    for back in range(TILE, end + TILE, TILE):
        block, _, offset, inside, mask = tile_at(end - back, counts, WIDTH, VECTOR, TILE)
        if AMSGRAD:
            averaged = load_tile(max_exp_avg_sq, offset, inside, mask, COMPUTE, VECTOR)
            total += tl.sum(tl.sum(averaged, axis=0), axis=1).to(tl.float64)
        else:
            codes = load_tile(root_codes, offset, inside, mask, tl.int32, VECTOR)
            total += sums_of_blocks(codes, load_scales(root_scales, block, counts), mask)
    return tl.sum(total)


@triton.jit
def sum_of_next_max_coded(
    tensor_row, codec_row, hyper_row, start, count, grad_factor,
    GRAD: tl.constexpr, AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns what `segments.sum_of_next_max` does."""
    first, counts, _, _ = segment_blocks(codec_row, start, count)
    operands = (
        elements(tensor_row, TENSOR.exp_avg_sq, start, tl.uint8),
        elements(codec_row, CODEC.exp_avg_sq_scales, first, tl.float32),
        elements(tensor_row, TENSOR.max_exp_avg_sq, start, AVERAGED),
        elements(tensor_row, TENSOR.grad, start, GRAD),
    )
    beta2 = tl.load(hyper_row + HYPER.beta2)
    scalars = grad_factor.to(COMPUTE), beta2.to(COMPUTE), (1 - beta2).to(COMPUTE)
    if is_in_vectors(tensor_row, count):
        total = sum_of_next_max_tiles(operands, counts, scalars, COMPUTE, LANES * VECTOR, VECTOR, TILE)
    else:
        total = sum_of_next_max_tiles(operands, counts, scalars, COMPUTE, UNALIGNED_WIDTH, 1, UNALIGNED)
    return total


@triton.jit
def sum_of_next_max_tiles(
    operands, counts, scalars,
    COMPUTE: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    root_codes, root_scales, max_exp_avg_sq, grad = operands
    grad_scale, beta2, one_minus_beta2 = scalars
    total = tl.zeros([BLOCK_LENGTH // WIDTH, TILE, WIDTH], COMPUTE)
    for begin in range(0, counts[0], TILE):
        block, _, offset, inside, mask = tile_at(begin, counts, WIDTH, VECTOR, TILE)
        g = load_tile(grad, offset, inside, mask, COMPUTE, VECTOR) * grad_scale
        root = load_tile(root_codes, offset, inside, mask, COMPUTE, VECTOR)
        root *= load_scales(root_scales, block, counts)[None, :, None]
        v = beta2 * (root * root) + one_minus_beta2 * g * g
        total += larger(load_tile(max_exp_avg_sq, offset, inside, mask, COMPUTE, VECTOR), v)
    return tl.sum(total.to(tl.float64))
