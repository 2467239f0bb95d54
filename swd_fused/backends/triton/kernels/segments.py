"""The passes over one segment, a stretch of one tensor.

A segment is walked in blocks: whole ones if the tensor is aligned, then shorter ones, element by element. If moments
are kept in 8 bits it is walked in tiles of blocks of codes, in vectors or element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels import eight_bit
from swd_fused.backends.triton.kernels.eight_bit import (
    BLOCK_LENGTH,
    BLOCKS_IN_FLIGHT,
    LANES,
    UNALIGNED_BLOCKS,
    UNALIGNED_WIDTH,
    has_codes,
    is_in_vectors,
)
from swd_fused.backends.triton.kernels.element import Scalars, next_average, next_max, square_root, update_element
from swd_fused.backends.triton.kernels.rounding import (
    joined_master,
    moment_key,
    segment_rounding,
    split_master,
    stochastically_rounded,
    stochastically_rounded_in_blocks,
)
from swd_fused.backends.triton.kernels.schedule import ema_weight
from swd_fused.backends.triton.kernels.tables import (
    HYPER,
    LIMIT,
    SUM,
    THREADS,
    Tile,
    elements,
    is_aligned,
    load,
    load_pairs,
    operands_of,
    store,
)

# How many blocks of gradients pass 1 loads at once. With one block for each program a B200 would wait for its memory,
# since 8 TB/s at a latency of 800 ns are 43 KB for each multiprocessor.
PASS1_BLOCKS = tl.constexpr(8)


# Squares leave float32's range if gradients are below 1e-19 or above 1e19. If a sum may have lost some of them, it is
# computed again from gradients scaled by a power of two: in wide loads that do not wait for one another, and in
# float32, since float64 has a 64th of the rate on many GPUs. A sum has up to 2^18 squares.
# - A sum above LEAST_FLOAT_SUM has lost at most 2^18 * 2^-126, no more than float32's resolution.
# - A sum below it is in truth below 2^-79, so the sum of squares that are 2^200 times as large is below 2^121. The
#   least number, 2^-149, then has the square 2^-98, so nothing is lost: if the sum is 0, all gradients are.
# - An infinite sum is in truth above 2^127, or 2^-73 if scaled down, of which 2^18 * 2^-126 may be lost. Squares are
#   then below 2^56, so only infinite gradients have an infinite sum. NaN remains NaN.
LEAST_FLOAT_SUM = tl.constexpr(2.0**-80)
SCALE_UP, SCALE_DOWN = tl.constexpr(2.0**100), tl.constexpr(2.0**-100)


@triton.jit
def whole_blocks(segment, ELEMENTS: tl.constexpr):
    """Returns how many elements from the first one on can be taken in whole, aligned blocks."""
    return tl.where(is_aligned(segment), segment.count // ELEMENTS * ELEMENTS, 0)


@triton.jit
def whole_and_rest(segment, CONFIG: tl.constexpr):
    """Returns how many elements are taken in whole blocks, and how many in the shorter ones after these."""
    whole = whole_blocks(segment, CONFIG.block)
    return whole, (segment.count - whole + CONFIG.tail - 1) // CONFIG.tail * CONFIG.tail


@triton.jit
def sum_of_squares(segment, GRAD: tl.constexpr, COMPUTE: tl.constexpr):
    return kept_squares(sum_of_scaled_squares(segment, 1.0, GRAD, COMPUTE, False), segment, GRAD, COMPUTE)


@triton.jit
def kept_squares(squares, segment, GRAD: tl.constexpr, COMPUTE: tl.constexpr):
    """Returns the sum of grad^2 over a segment, from its sum in COMPUTE. No square of a float16 number is lost."""
    if COMPUTE != tl.float64 and GRAD != tl.float16:  # noqa: SIM300 (these are types)
        if (squares < LEAST_FLOAT_SUM) | (squares - squares != 0):
            WIDE: tl.constexpr = COMPUTE if GRAD.primitive_bitwidth <= 32 else tl.float64
            scale = tl.where(squares < LEAST_FLOAT_SUM, SCALE_UP, SCALE_DOWN)
            squares = sum_of_scaled_squares(segment, scale.to(WIDE), GRAD, WIDE, True)
            inverse = 1 / scale.to(tl.float64)
            squares = squares * inverse * inverse
    return squares


@triton.jit
def sum_of_scaled_squares(segment, scale, GRAD: tl.constexpr, COMPUTE: tl.constexpr, SCALED: tl.constexpr):
    """Returns the sum of (scale * grad)^2. Unless SCALED, the scale is 1 and not multiplied."""
    BLOCK: tl.constexpr = THREADS * 128 // max(GRAD.primitive_bitwidth, 32)
    PACKED: tl.constexpr = 32 // min(GRAD.primitive_bitwidth, 32)
    grad = elements(segment.grad, 0, segment.start, GRAD)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], COMPUTE)
    whole = whole_blocks(segment, PASS1_BLOCKS * PACKED * BLOCK)
    for begin in range(0, whole, PASS1_BLOCKS * PACKED * BLOCK):
        for block in tl.static_range(PASS1_BLOCKS):
            if PACKED == 2:
                words = grad.to(tl.pointer_type(tl.uint32))
                x, y = load_pairs(words, begin // 2 + block * BLOCK + lanes, GRAD, COMPUTE)
                total += square(x, scale, SCALED)
                total += square(y, scale, SCALED)
            else:
                tile = Tile(begin + block * BLOCK + lanes, None, None, None, None)
                total += square(load(grad, tile, COMPUTE, BLOCK // THREADS), scale, SCALED)
    for begin in range(whole, segment.count, BLOCK):
        tile = Tile(begin + lanes, None, begin + lanes < segment.count, None, None)
        total += square(load(grad, tile, COMPUTE, 1), scale, SCALED)
    return tl.sum(total.to(tl.float64))


@triton.jit
def square(x, scale, SCALED: tl.constexpr):
    if SCALED:
        x = x * scale
    return x * x


# --- Sums of second moments, as they are stored


@triton.jit
def sum_of_stored(segment, CONFIG: tl.constexpr):
    """Returns the sum of stored second moments, in the order of `update_segment`, so the bits are the same."""
    if CONFIG.coded and has_codes(segment):
        if is_in_vectors(segment):
            total = sum_of_tiles(segment, CONFIG, LANES * CONFIG.vector, CONFIG.vector, BLOCKS_IN_FLIGHT)
        else:
            total = sum_of_tiles(segment, CONFIG, UNALIGNED_WIDTH, 1, UNALIGNED_BLOCKS)
    else:
        operands = operands_of(segment, CONFIG, CONFIG.exp_avg, CONFIG.exp_avg_sq)
        averaged = operands.max_exp_avg_sq if CONFIG.amsgrad else operands.exp_avg_sq
        whole, rest = whole_and_rest(segment, CONFIG)
        total = sum_of_blocks(averaged, whole + rest, rest, segment.count, CONFIG.compute, CONFIG.tail, 1)
        total += sum_of_blocks(averaged, whole, whole, None, CONFIG.compute, CONFIG.block, CONFIG.vector)
    return total


@triton.jit
def sum_of_blocks(tensor, end, length, count, COMPUTE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], COMPUTE)
    for back in range(BLOCK, length + BLOCK, BLOCK):
        offsets = end - back + lanes
        if count is None:
            total += load(tensor, Tile(offsets, None, None, None, None), COMPUTE, VECTOR)
        else:
            total += load(tensor, Tile(offsets, None, offsets < count, None, None), COMPUTE, VECTOR)
    return tl.sum(total.to(tl.float64))


@triton.jit
def sum_of_tiles(segment, CONFIG: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, BLOCKS: tl.constexpr):
    operands, scales, blocks = eight_bit.coded_operands_of(segment, CONFIG)
    total = tl.zeros([BLOCKS], tl.float64)
    end = (blocks.count + BLOCKS - 1) // BLOCKS * BLOCKS
    for back in range(BLOCKS, end + BLOCKS, BLOCKS):
        tile = eight_bit.tile_at(end - back, blocks, WIDTH, VECTOR, BLOCKS)
        if CONFIG.amsgrad:
            averaged = load(operands.max_exp_avg_sq, tile, CONFIG.compute, VECTOR)
            total += tl.sum(tl.sum(averaged, axis=0), axis=1).to(tl.float64)
        else:
            codes = load(operands.exp_avg_sq, tile, tl.int32, VECTOR)
            total += eight_bit.sums_of_blocks(codes, eight_bit.load_scales(scales.exp_avg_sq, tile, blocks), tile.mask)
    return tl.sum(total)


# --- Pass 1 of amsgrad


@triton.jit
def sum_of_next_max(segment, grad_factor, CONFIG: tl.constexpr):
    """Returns the sum of max_exp_avg_sq as this step will leave it."""
    COMPUTE: tl.constexpr = CONFIG.compute
    beta2 = tl.load(segment.hyper_row + HYPER.beta2)
    scalars = grad_factor.to(COMPUTE), beta2.to(COMPUTE), (1 - beta2).to(COMPUTE)
    if CONFIG.coded and has_codes(segment):
        if is_in_vectors(segment):
            total = next_max_of_tiles(segment, scalars, CONFIG, LANES * CONFIG.vector, CONFIG.vector, BLOCKS_IN_FLIGHT)
        else:
            total = next_max_of_tiles(segment, scalars, CONFIG, UNALIGNED_WIDTH, 1, UNALIGNED_BLOCKS)
    else:
        total = next_max_of_blocks(segment, scalars, CONFIG, CONFIG.block)
    return total


@triton.jit
def next_max_of_blocks(segment, scalars, CONFIG: tl.constexpr, BLOCK: tl.constexpr):
    operands = operands_of(segment, CONFIG, CONFIG.exp_avg, CONFIG.exp_avg_sq)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], CONFIG.compute)
    whole = whole_blocks(segment, BLOCK)
    for begin in range(0, whole, BLOCK):
        total += next_max_of(operands, Tile(begin + lanes, None, None, None, None), scalars, CONFIG, CONFIG.vector)
    for begin in range(whole, segment.count, BLOCK):
        tile = Tile(begin + lanes, None, begin + lanes < segment.count, None, None)
        total += next_max_of(operands, tile, scalars, CONFIG, 1)
    return tl.sum(total.to(tl.float64))


@triton.jit
def next_max_of(operands, tile, scalars, CONFIG: tl.constexpr, VECTOR: tl.constexpr):
    grad = load(operands.grad, tile, CONFIG.compute, VECTOR)
    exp_avg_sq = load(operands.exp_avg_sq, tile, CONFIG.compute, VECTOR)
    return next_max(grad, exp_avg_sq, load(operands.max_exp_avg_sq, tile, CONFIG.compute, VECTOR), scalars)


@triton.jit
def next_max_of_tiles(
    segment, scalars, CONFIG: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    operands, scales, blocks = eight_bit.coded_operands_of(segment, CONFIG)
    total = tl.zeros([BLOCK_LENGTH // WIDTH, BLOCKS, WIDTH], CONFIG.compute)
    for begin in range(0, blocks.count, BLOCKS):
        tile = eight_bit.tile_at(begin, blocks, WIDTH, VECTOR, BLOCKS)
        grad = load(operands.grad, tile, CONFIG.compute, VECTOR)
        root = eight_bit.decoded(operands.exp_avg_sq, scales.exp_avg_sq, tile, blocks, CONFIG.compute, VECTOR)
        maximum = load(operands.max_exp_avg_sq, tile, CONFIG.compute, VECTOR)
        total += next_max(grad, root * root, maximum, scalars)
    return tl.sum(total.to(tl.float64))


# --- Pass 2


@triton.jit
def segment_scalars(segment, sums_row, step, grad_factor, CONFIG: tl.constexpr):
    row = segment.hyper_row
    beta1, beta2 = tl.load(row + HYPER.beta1), tl.load(row + HYPER.beta2)
    decay_factor = tl.load(sums_row + SUM.decay_factor).to(CONFIG.compute)
    return Scalars(
        (tl.load(row + HYPER.sign) * grad_factor).to(CONFIG.compute),
        # Compilers leave out a product with the constant 0.
        tl.load(row + HYPER.l2).to(CONFIG.compute) if CONFIG.adds_l2 else tl.full([], 0.0, CONFIG.compute),
        tl.load(sums_row + SUM.inv_sqrt_bias_correction2).to(CONFIG.compute),
        tl.load(row + HYPER.eps).to(CONFIG.compute),
        decay_factor,
        tl.load(sums_row + SUM.step_size).to(CONFIG.compute),
        beta1 <= 0.5,  # see csrc/element.h
        tl.where(beta1 <= 0.5, -beta1, 1 - beta1).to(CONFIG.compute),
        beta2.to(CONFIG.compute),
        (1 - beta2).to(CONFIG.compute),
        # Read only if some group is cautious.
        tl.where(tl.load(row + HYPER.cautious) != 0, 1.0, decay_factor) if CONFIG.cautious else 0,
        ema_weight(step, row).to(CONFIG.compute) if CONFIG.averages else 0,
    )


@triton.jit
def update_segment(
    segment, sums_row, step, grad_factor, limits, CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr
):  # fmt: skip
    """Updates a segment. Returns the sum of its second moments, and with SUM_GRADS, for `kept_squares`, of grad^2."""
    rounding_start = tl.load(limits + LIMIT.rounding_start)
    scalars = segment_scalars(segment, sums_row, step, grad_factor, CONFIG)
    rounding = segment_rounding(rounding_start, segment, step) if CONFIG.stochastic else 0
    if CONFIG.coded and has_codes(segment):
        key = moment_key(rounding_start, segment, step)
        if is_in_vectors(segment):
            total, squares = update_tiles(
                segment, key, rounding, scalars, CONFIG, SUM_GRADS,
                LANES * CONFIG.vector, CONFIG.vector, BLOCKS_IN_FLIGHT,
            )  # fmt: skip
        else:
            total, squares = update_tiles(
                segment, key, rounding, scalars, CONFIG, SUM_GRADS, UNALIGNED_WIDTH, 1, UNALIGNED_BLOCKS
            )
    else:
        operands = operands_of(segment, CONFIG, CONFIG.exp_avg, CONFIG.exp_avg_sq)
        whole, rest = whole_and_rest(segment, CONFIG)
        end = whole + rest
        total, squares = update_blocks(
            operands, end, rest, segment.count, rounding, scalars, CONFIG, SUM_GRADS, CONFIG.tail, 1
        )
        whole_total, whole_squares = update_blocks(
            operands, whole, whole, None, rounding, scalars, CONFIG, SUM_GRADS, CONFIG.block, CONFIG.vector
        )
        total += whole_total
        squares += whole_squares
    return total, squares


@triton.jit
def update_blocks(
    operands, end, length, count, rounding, scalars,
    CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Updates blocks, backwards from `end`. All blocks are whole if `count`, the number of elements, is None."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], CONFIG.compute)
    grad_total = tl.zeros([BLOCK], CONFIG.compute)
    for back in range(BLOCK, length + BLOCK, BLOCK):
        offsets = end - back + lanes
        mask = None if count is None else offsets < count
        tile = Tile(offsets, None, mask, None, None)
        averaged, squares = update_tile(
            operands, tile, None, None, None, rounding, scalars, CONFIG, SUM_GRADS, VECTOR, False
        )
        total += averaged
        if SUM_GRADS:
            grad_total += squares
    return tl.sum(total.to(tl.float64)), tl.sum(grad_total.to(tl.float64))


@triton.jit
def update_tiles(
    segment, key, rounding, scalars, CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr,
    WIDTH: tl.constexpr, VECTOR: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    operands, scales, blocks = eight_bit.coded_operands_of(segment, CONFIG)
    total = tl.zeros([BLOCKS], tl.float64)
    grad_total = tl.zeros([BLOCKS, WIDTH], CONFIG.compute)
    end = (blocks.count + BLOCKS - 1) // BLOCKS * BLOCKS
    for back in range(BLOCKS, end + BLOCKS, BLOCKS):
        tile = eight_bit.tile_at(end - back, blocks, WIDTH, VECTOR, BLOCKS)
        averaged, squares = update_tile(
            operands, tile, blocks, scales, key, rounding, scalars, CONFIG, SUM_GRADS, VECTOR, True
        )
        total += averaged
        if SUM_GRADS:
            grad_total += squares
    return tl.sum(total), tl.sum(grad_total.to(tl.float64))


@triton.jit
def update_tile(
    operands, tile, blocks, scales, key, rounding, scalars,
    CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr, VECTOR: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Updates a tile. Returns the second moments that enter the schedule's mean, as they are stored, and grad^2.

    If moments are CODED, the former are summed for each block. The latter are summed within threads at once, since
    gradients would otherwise take registers to the end.
    """
    g = load(operands.grad, tile, CONFIG.compute, VECTOR)
    if CONFIG.weight == tl.int16:
        bits = load(operands.param.to(tl.pointer_type(tl.int16)), tile, tl.int32, VECTOR)
        p = joined_master(bits, load(operands.weight, tile, tl.int32, VECTOR)).to(CONFIG.compute)
    else:
        p = load(operands.weight, tile, CONFIG.compute, VECTOR)
    if CODED:
        m = eight_bit.decoded(operands.exp_avg, scales.exp_avg, tile, blocks, CONFIG.compute, VECTOR)
        root = eight_bit.decoded(operands.exp_avg_sq, scales.exp_avg_sq, tile, blocks, CONFIG.compute, VECTOR)
        v = root * root
    else:
        m = load(operands.exp_avg, tile, CONFIG.compute, VECTOR)
        v = load(operands.exp_avg_sq, tile, CONFIG.compute, VECTOR)
    largest = v
    if CONFIG.amsgrad:
        largest = load(operands.max_exp_avg_sq, tile, CONFIG.compute, VECTOR)
    if CONFIG.averages:
        e = load(operands.ema_param, tile, CONFIG.compute, VECTOR)
    squares = tl.sum(g * g, axis=0) if CODED else g * g
    p, m, v, largest, averaged, root = update_element(p, m, v, largest, g, scalars, CONFIG.amsgrad, CONFIG.cautious)
    if CONFIG.averages:
        store(operands.ema_param, next_average(e, p, scalars), tile, VECTOR)
    if CONFIG.weight == tl.int16:
        p, remainder = split_master(p)
        store(operands.weight, remainder, tile, VECTOR)
    elif CONFIG.master:
        store(operands.weight, p, tile, VECTOR)
    if CONFIG.stochastic:
        if CODED:
            p = stochastically_rounded_in_blocks(p, rounding, tile.offsets, tile.inside)
        else:
            p = stochastically_rounded(p, rounding, tile.offsets)
    store(operands.param, p, tile, VECTOR)
    if CONFIG.amsgrad:
        store(operands.max_exp_avg_sq, largest, tile, VECTOR)
    if CODED:
        root = square_root(v) if CONFIG.amsgrad else root
        noise, root_noise = eight_bit.tile_noise(key, blocks, tile)
        m, new_scales = eight_bit.encoded(m, noise, True)
        v, new_root_scales = eight_bit.encoded(root, root_noise, False)
    store(operands.exp_avg, m, tile, VECTOR)
    store(operands.exp_avg_sq, v, tile, VECTOR)
    if CODED:
        tl.store(scales.exp_avg + tile.block, new_scales, mask=tile.block < blocks.count)
        tl.store(scales.exp_avg_sq + tile.block, new_root_scales, mask=tile.block < blocks.count)
        if CONFIG.amsgrad:
            sums = tl.sum(tl.sum(averaged, axis=0), axis=1).to(tl.float64)
        else:
            sums = eight_bit.sums_of_blocks(v, new_root_scales, tile.mask)
    else:
        sums = averaged.to(CONFIG.averaged).to(CONFIG.compute)
    return sums, squares
