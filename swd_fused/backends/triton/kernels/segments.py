"""What each pass does with one segment, a stretch of one tensor."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.element import Scalars, next_average, next_max, update_element
from swd_fused.backends.triton.kernels.masters import joined_master, split_master
from swd_fused.backends.triton.kernels.memory import THREADS, elements, load_block, load_pairs, operands_of, store_block
from swd_fused.backends.triton.kernels.rounding import segment_rounding, stochastically_rounded
from swd_fused.backends.triton.kernels.schedule import ema_weight
from swd_fused.backends.triton.kernels.tables import HYPER, LIMIT, SUM, TENSOR

# Gradients that pass 1 has on their way at once, in blocks: with one block for each program a B200 would wait for its
# memory, since 8 TB/s at a latency of 800 ns are 43 KB for each multiprocessor.
PASS1_BLOCKS = tl.constexpr(8)


# Squares of float32 numbers leave its range where gradients are below 1e-19 or above 1e19, so where that may have lost
# something they are summed again, scaled by a power of two: in wide loads that do not wait for one another, and in
# float32, since float64 has a 64th of the rate on many GPUs. Sums are of up to 2^18 squares.
# - What is above LEAST_FLOAT_SUM has lost at most 2^18 * 2^-126 of it, no more than float32's resolution.
# - What is below it is below 2^-79 in truth, too, so of squares that are 2^200 times as large no sum exceeds 2^121. The
#   least number, 2^-149, then has the square 2^-98, so nothing is lost: if the sum is 0, all gradients are.
# - What is infinite is above 2^127 in truth, 2^-73 if scaled down, of which 2^18 * 2^-126 may be lost; squares are then
#   below 2^56, so that only infinite gradients have an infinite sum. NaN remains NaN.
LEAST_FLOAT_SUM = tl.constexpr(2.0**-80)
SCALE_UP, SCALE_DOWN = tl.constexpr(2.0**100), tl.constexpr(2.0**-100)


@triton.jit
def whole_blocks(segment, ELEMENTS: tl.constexpr):
    """How many elements from the first one on may be taken in whole, aligned blocks."""
    return tl.load(segment.row + TENSOR.aligned).to(tl.int32) * (segment.count // ELEMENTS) * ELEMENTS


@triton.jit
def whole_and_rest(segment, CONFIG: tl.constexpr):
    """How many elements are taken in whole blocks, and in shorter ones behind these."""
    whole = whole_blocks(segment, CONFIG.block)
    return whole, (segment.count - whole + CONFIG.tail - 1) // CONFIG.tail * CONFIG.tail


@triton.jit
def sum_of_squares(segment, GRAD: tl.constexpr, COMPUTE: tl.constexpr):
    return kept_squares(sum_of_scaled_squares(segment, 1.0, GRAD, COMPUTE, False), segment, GRAD, COMPUTE)


@triton.jit
def kept_squares(squares, segment, GRAD: tl.constexpr, COMPUTE: tl.constexpr):
    """The sum of grad^2 over a segment, from what it is in COMPUTE. Of float16 numbers no square is lost."""
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
    """The sum of (scale * grad)^2. What is not SCALED need not be multiplied."""
    BLOCK: tl.constexpr = THREADS * 128 // max(GRAD.primitive_bitwidth, 32)
    PACKED: tl.constexpr = 32 // min(GRAD.primitive_bitwidth, 32)
    grad = elements(segment.row, TENSOR.grad, segment.start, GRAD)
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
                x = load_block(grad, begin + block * BLOCK + lanes, segment.count, COMPUTE, BLOCK // THREADS)
                total += square(x, scale, SCALED)
    for begin in range(whole, segment.count, BLOCK):
        total += square(load_block(grad, begin + lanes, segment.count, COMPUTE, 0), scale, SCALED)
    return tl.sum(total.to(tl.float64))


@triton.jit
def square(x, scale, SCALED: tl.constexpr):
    if SCALED:
        x = x * scale
    return x * x


@triton.jit
def sum_of_stored(segment, CONFIG: tl.constexpr):
    """In the order in which `update_segment` adds, so the result has the same bits."""
    operands = operands_of(segment, CONFIG, CONFIG.exp_avg, CONFIG.exp_avg_sq)
    averaged = operands.max_exp_avg_sq if CONFIG.amsgrad else operands.exp_avg_sq
    whole, rest = whole_and_rest(segment, CONFIG)
    tail = sum_of_blocks(averaged, whole + rest, rest, segment.count, CONFIG.compute, CONFIG.tail, 0)
    return tail + sum_of_blocks(averaged, whole, whole, segment.count, CONFIG.compute, CONFIG.block, CONFIG.vector)


@triton.jit
def sum_of_blocks(tensor, end, length, count, COMPUTE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], COMPUTE)
    for back in range(BLOCK, length + BLOCK, BLOCK):
        total += load_block(tensor, end - back + lanes, count, COMPUTE, VECTOR)
    return tl.sum(total.to(tl.float64))


@triton.jit
def next_max_scalars(segment, grad_factor, COMPUTE: tl.constexpr):
    beta2 = tl.load(segment.hyper_row + HYPER.beta2)
    return grad_factor.to(COMPUTE), beta2.to(COMPUTE), (1 - beta2).to(COMPUTE)


@triton.jit
def sum_of_next_max(segment, grad_factor, CONFIG: tl.constexpr):
    """The sum of max_exp_avg_sq as this step will leave it."""
    BLOCK: tl.constexpr = CONFIG.block
    operands = operands_of(segment, CONFIG, CONFIG.exp_avg, CONFIG.exp_avg_sq)
    scalars = next_max_scalars(segment, grad_factor, CONFIG.compute)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], CONFIG.compute)
    whole = whole_blocks(segment, BLOCK)
    for begin in range(0, whole, BLOCK):
        total += next_max_block(operands, begin + lanes, segment.count, scalars, CONFIG.compute, CONFIG.vector)
    for begin in range(whole, segment.count, BLOCK):
        total += next_max_block(operands, begin + lanes, segment.count, scalars, CONFIG.compute, 0)
    return tl.sum(total.to(tl.float64))


@triton.jit
def next_max_block(operands, offsets, count, scalars, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    grad = load_block(operands.grad, offsets, count, COMPUTE, VECTOR)
    exp_avg_sq = load_block(operands.exp_avg_sq, offsets, count, COMPUTE, VECTOR)
    return next_max(grad, exp_avg_sq, load_block(operands.max_exp_avg_sq, offsets, count, COMPUTE, VECTOR), scalars)


@triton.jit
def segment_scalars(segment, sums_row, step, grad_factor, CONFIG: tl.constexpr):
    row = segment.hyper_row
    beta1, beta2 = tl.load(row + HYPER.beta1), tl.load(row + HYPER.beta2)
    decay_factor = tl.load(sums_row + SUM.decay_factor).to(CONFIG.compute)
    return Scalars(
        (tl.load(row + HYPER.sign) * grad_factor).to(CONFIG.compute),
        # Compilers leave out what is multiplied by a constant 0.
        tl.load(row + HYPER.l2).to(CONFIG.compute) if CONFIG.adds_l2 else tl.full([], 0.0, CONFIG.compute),
        tl.load(sums_row + SUM.inv_sqrt_bias_correction2).to(CONFIG.compute),
        tl.load(row + HYPER.eps).to(CONFIG.compute),
        decay_factor,
        tl.load(sums_row + SUM.step_size).to(CONFIG.compute),
        beta1 <= 0.5,  # see csrc/element.h
        tl.where(beta1 <= 0.5, -beta1, 1 - beta1).to(CONFIG.compute),
        beta2.to(CONFIG.compute),
        (1 - beta2).to(CONFIG.compute),
        # Nobody asks for it unless some group is cautious.
        tl.where(tl.load(row + HYPER.cautious) != 0, 1.0, decay_factor) if CONFIG.cautious else 0,
        ema_weight(step, row).to(CONFIG.compute) if CONFIG.averages else 0,
    )


@triton.jit
def update_segment(
    segment, sums_row, step, grad_factor, limits, CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr
):  # fmt: skip
    """Returns the sum of the second moments that it leaves, and with SUM_GRADS that of grad^2, for `kept_squares`."""
    rounding_start = tl.load(limits + LIMIT.rounding_start)
    scalars = segment_scalars(segment, sums_row, step, grad_factor, CONFIG)
    operands = operands_of(segment, CONFIG, CONFIG.exp_avg, CONFIG.exp_avg_sq)
    rounding = segment_rounding(rounding_start, segment, step) if CONFIG.stochastic else 0
    whole, rest = whole_and_rest(segment, CONFIG)
    end = whole + rest
    tail_total, tail_squares = update_blocks(
        operands, end, rest, segment.count, rounding, scalars, CONFIG, SUM_GRADS, CONFIG.tail, 0
    )
    total, squares = update_blocks(
        operands, whole, whole, segment.count, rounding, scalars, CONFIG, SUM_GRADS, CONFIG.block, CONFIG.vector
    )
    return tail_total + total, tail_squares + squares


@triton.jit
def update_blocks(
    operands, end, length, count, rounding, scalars,
    CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Goes backwards from `end`."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], CONFIG.compute)
    grad_total = tl.zeros([BLOCK], CONFIG.compute)
    for back in range(BLOCK, length + BLOCK, BLOCK):
        averaged, squares = update_block(operands, end - back + lanes, count, rounding, scalars, CONFIG, VECTOR)
        total += averaged
        if SUM_GRADS:
            grad_total += squares
    return tl.sum(total.to(tl.float64)), tl.sum(grad_total.to(tl.float64))


@triton.jit
def update_block(operands, offsets, count, rounding, scalars, CONFIG: tl.constexpr, VECTOR: tl.constexpr):
    """Returns the second moments whose mean is the schedule, as they are stored, and grad^2."""
    g = load_block(operands.grad, offsets, count, CONFIG.compute, VECTOR)
    if CONFIG.weight == tl.int16:
        bits = load_block(operands.param.to(tl.pointer_type(tl.int16)), offsets, count, tl.int32, VECTOR)
        p = joined_master(bits, load_block(operands.weight, offsets, count, tl.int32, VECTOR)).to(CONFIG.compute)
    else:
        p = load_block(operands.weight, offsets, count, CONFIG.compute, VECTOR)
    m = load_block(operands.exp_avg, offsets, count, CONFIG.compute, VECTOR)
    v = load_block(operands.exp_avg_sq, offsets, count, CONFIG.compute, VECTOR)
    largest = v
    if CONFIG.amsgrad:
        largest = load_block(operands.max_exp_avg_sq, offsets, count, CONFIG.compute, VECTOR)
    if CONFIG.averages:
        e = load_block(operands.ema_param, offsets, count, CONFIG.compute, VECTOR)
    p, m, v, largest, averaged, _ = update_element(p, m, v, largest, g, scalars, CONFIG.amsgrad, CONFIG.cautious)
    if CONFIG.averages:
        store_block(operands.ema_param, next_average(e, p, scalars), offsets, count, VECTOR)
    if CONFIG.weight == tl.int16:
        p, remainder = split_master(p)
        store_block(operands.weight, remainder, offsets, count, VECTOR)
    elif CONFIG.master:
        store_block(operands.weight, p, offsets, count, VECTOR)
    if CONFIG.stochastic:
        p = stochastically_rounded(p, rounding, offsets)
    store_block(operands.param, p, offsets, count, VECTOR)
    store_block(operands.exp_avg, m, offsets, count, VECTOR)
    store_block(operands.exp_avg_sq, v, offsets, count, VECTOR)
    if CONFIG.amsgrad:
        store_block(operands.max_exp_avg_sq, largest, offsets, count, VECTOR)
    return averaged.to(CONFIG.averaged).to(CONFIG.compute), g * g
