"""What each pass does with one segment, a stretch of one tensor."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.element import larger, update_element
from swd_fused.backends.triton.kernels.memory import THREADS, elements, load_block, load_pairs, store_block
from swd_fused.backends.triton.kernels.rounding import segment_rounding, stochastically_rounded
from swd_fused.backends.triton.kernels.schedule import bias_correction, decay_factor
from swd_fused.backends.triton.kernels.tables import HYPER, TENSOR

# Gradients that pass 1 has on their way at once, in blocks: with one block for each program a B200 would wait for its
# memory, since 8 TB/s at a latency of 800 ns are 43 KB for each multiprocessor.
PASS1_BLOCKS = tl.constexpr(8)


# Squares of float32 numbers leave its range where gradients are below 1e-19 or above 1e19, so sums of them are taken
# again in float64 where that may have lost something. The lower limit: up to 2^18 squares, each of which may have lost
# 2^-126, lose no more than float32's resolution of 2^-80.
LEAST_FLOAT_SUM = tl.constexpr(2.0**-80)


@triton.jit
def whole_blocks(tensor_row, count, ELEMENTS: tl.constexpr):
    """How many elements from the first one on may be taken in whole, aligned blocks."""
    return tl.load(tensor_row + TENSOR.aligned).to(tl.int32) * (count // ELEMENTS) * ELEMENTS


@triton.jit
def sum_of_squares(tensor_row, start, count, GRAD: tl.constexpr, COMPUTE: tl.constexpr):
    BLOCK: tl.constexpr = THREADS * 128 // max(GRAD.primitive_bitwidth, 32)
    PACKED: tl.constexpr = 32 // min(GRAD.primitive_bitwidth, 32)
    grad = elements(tensor_row, TENSOR.grad, start, GRAD)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], COMPUTE)
    whole = whole_blocks(tensor_row, count, PASS1_BLOCKS * PACKED * BLOCK)
    for begin in range(0, whole, PASS1_BLOCKS * PACKED * BLOCK):
        for block in tl.static_range(PASS1_BLOCKS):
            if PACKED == 2:
                words = grad.to(tl.pointer_type(tl.uint32))
                x, y = load_pairs(words, begin // 2 + block * BLOCK + lanes, GRAD, COMPUTE)
                total += x * x
                total += y * y
            else:
                x = load_block(grad, begin + block * BLOCK + lanes, count, COMPUTE, BLOCK // THREADS)
                total += x * x
    for begin in range(whole, count, BLOCK):
        x = load_block(grad, begin + lanes, count, COMPUTE, 0)
        total += x * x
    return kept_squares(tl.sum(total.to(tl.float64)), tensor_row, start, count, GRAD, COMPUTE)


@triton.jit
def kept_squares(squares, tensor_row, start, count, GRAD: tl.constexpr, COMPUTE: tl.constexpr):
    """The sum of grad^2 over a segment, from what it is in COMPUTE. Of float16 numbers no square is lost."""
    if COMPUTE != tl.float64 and GRAD != tl.float16:  # noqa: SIM300 (these are types)
        if (squares < LEAST_FLOAT_SUM) | (squares - squares != 0):
            grad = elements(tensor_row, TENSOR.grad, start, GRAD)
            lanes = tl.arange(0, THREADS)
            total = tl.zeros([THREADS], tl.float64)
            for begin in range(0, count, THREADS):
                x = load_block(grad, begin + lanes, count, tl.float64, 0)
                total += x * x
            squares = tl.sum(total)
    return squares


@triton.jit
def sum_of_stored(
    tensor_row, start, count,
    AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In the order in which `update_segment` adds, so the result has the same bits."""
    if AMSGRAD:
        averaged = elements(tensor_row, TENSOR.max_exp_avg_sq, start, AVERAGED)
    else:
        averaged = elements(tensor_row, TENSOR.exp_avg_sq, start, AVERAGED)
    TAIL: tl.constexpr = THREADS * VECTOR // 2
    tail_lanes = tl.arange(0, TAIL)
    tail_total = tl.zeros([TAIL], COMPUTE)
    whole = whole_blocks(tensor_row, count, BLOCK)
    rest = (count - whole + TAIL - 1) // TAIL * TAIL
    for back in range(TAIL, rest + TAIL, TAIL):
        tail_total += load_block(averaged, whole + rest - back + tail_lanes, count, COMPUTE, 0)
    tail_sum = tl.sum(tail_total.to(tl.float64))
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], COMPUTE)
    for back in range(BLOCK, whole + BLOCK, BLOCK):
        total += load_block(averaged, whole - back + lanes, count, COMPUTE, VECTOR)
    return tail_sum + tl.sum(total.to(tl.float64))


@triton.jit
def sum_of_next_max(
    tensor_row, hyper_row, start, count, grad_factor,
    GRAD: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of max_exp_avg_sq as this step will leave it."""
    grad = elements(tensor_row, TENSOR.grad, start, GRAD)
    exp_avg_sq = elements(tensor_row, TENSOR.exp_avg_sq, start, EXP_AVG_SQ)
    max_exp_avg_sq = elements(tensor_row, TENSOR.max_exp_avg_sq, start, AVERAGED)
    grad_scale = grad_factor.to(COMPUTE)
    beta2 = tl.load(hyper_row + HYPER.beta2).to(COMPUTE)
    one_minus_beta2 = (1 - tl.load(hyper_row + HYPER.beta2)).to(COMPUTE)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], COMPUTE)
    whole = whole_blocks(tensor_row, count, BLOCK)
    for begin in range(0, whole, BLOCK):
        g = load_block(grad, begin + lanes, count, COMPUTE, VECTOR) * grad_scale
        v = beta2 * load_block(exp_avg_sq, begin + lanes, count, COMPUTE, VECTOR) + one_minus_beta2 * g * g
        total += larger(load_block(max_exp_avg_sq, begin + lanes, count, COMPUTE, VECTOR), v)
    for begin in range(whole, count, BLOCK):
        g = load_block(grad, begin + lanes, count, COMPUTE, 0) * grad_scale
        v = beta2 * load_block(exp_avg_sq, begin + lanes, count, COMPUTE, 0) + one_minus_beta2 * g * g
        total += larger(load_block(max_exp_avg_sq, begin + lanes, count, COMPUTE, 0), v)
    return tl.sum(total.to(tl.float64))


@triton.jit
def segment_scalars(hyper_row, step, exp_avg_sq_mean, grad_factor, COMPUTE: tl.constexpr, ADDS_L2: tl.constexpr):
    """What `update_element` takes besides its operands. Without ADDS_L2 compilers leave out what is multiplied by 0."""
    beta1, beta2 = tl.load(hyper_row + HYPER.beta1), tl.load(hyper_row + HYPER.beta2)
    corrects_bias = tl.load(hyper_row + HYPER.corrects_bias)
    grad_scale = (tl.load(hyper_row + HYPER.sign) * grad_factor).to(COMPUTE)
    if ADDS_L2:
        l2 = tl.load(hyper_row + HYPER.l2).to(COMPUTE)
    else:
        l2 = tl.full([], 0.0, COMPUTE)
    inv_sqrt_bias_correction2 = (1 / tl.sqrt(bias_correction(beta2, step, step, corrects_bias))).to(COMPUTE)
    eps = tl.load(hyper_row + HYPER.eps).to(COMPUTE)
    factor = decay_factor(exp_avg_sq_mean, hyper_row).to(COMPUTE)
    step_size = (tl.load(hyper_row + HYPER.lr) / bias_correction(beta1, step, step, corrects_bias)).to(COMPUTE)
    from_grad = beta1 <= 0.5  # see csrc/element.h
    exp_avg_slope = tl.where(from_grad, -beta1, 1 - beta1).to(COMPUTE)
    beta2, one_minus_beta2 = beta2.to(COMPUTE), (1 - beta2).to(COMPUTE)
    return (
        grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, factor,
        step_size,
    )  # fmt: skip


@triton.jit
def update_segment(
    tensor_row, hyper_row, start, count, step, exp_avg_sq_mean, grad_factor, rounding_start,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    ADDS_L2: tl.constexpr, SUM_GRADS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the sum of the second moments that it leaves, and with SUM_GRADS that of grad^2, for `kept_squares`."""
    (
        grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, factor,
        step_size,
    ) = segment_scalars(hyper_row, step, exp_avg_sq_mean, grad_factor, COMPUTE, ADDS_L2)  # fmt: skip
    param = elements(tensor_row, TENSOR.param, start, PARAM)
    if MASTER:
        weight = elements(tensor_row, TENSOR.master, start, WEIGHT)
    else:
        weight = param
    exp_avg = elements(tensor_row, TENSOR.exp_avg, start, EXP_AVG)
    exp_avg_sq = elements(tensor_row, TENSOR.exp_avg_sq, start, EXP_AVG_SQ)
    max_exp_avg_sq = elements(tensor_row, TENSOR.max_exp_avg_sq, start, AVERAGED)
    grad = elements(tensor_row, TENSOR.grad, start, GRAD)
    if STOCHASTIC:
        rounding = segment_rounding(rounding_start, tensor_row, step, start)
    else:
        rounding = 0
    # What is not whole goes in shorter blocks: masks and addresses of single elements take many registers.
    TAIL: tl.constexpr = THREADS * VECTOR // 2
    tail_lanes = tl.arange(0, TAIL)
    tail_total = tl.zeros([TAIL], COMPUTE)
    tail_grad_total = tl.zeros([TAIL], COMPUTE)
    whole = whole_blocks(tensor_row, count, BLOCK)
    rest = (count - whole + TAIL - 1) // TAIL * TAIL
    for back in range(TAIL, rest + TAIL, TAIL):
        averaged, squares = update_block(
            param, weight, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, whole + rest - back + tail_lanes, count, rounding,
            grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, factor,
            step_size, COMPUTE, AMSGRAD, MASTER, STOCHASTIC, 0,
        )  # fmt: skip
        tail_total += averaged
        if SUM_GRADS:
            tail_grad_total += squares
    tail_sum, tail_squares = tl.sum(tail_total.to(tl.float64)), tl.sum(tail_grad_total.to(tl.float64))
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], COMPUTE)
    grad_total = tl.zeros([BLOCK], COMPUTE)
    for back in range(BLOCK, whole + BLOCK, BLOCK):
        averaged, squares = update_block(
            param, weight, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, whole - back + lanes, count, rounding,
            grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, factor,
            step_size, COMPUTE, AMSGRAD, MASTER, STOCHASTIC, VECTOR,
        )  # fmt: skip
        total += averaged
        if SUM_GRADS:
            grad_total += squares
    return tail_sum + tl.sum(total.to(tl.float64)), tail_squares + tl.sum(grad_total.to(tl.float64))


@triton.jit
def update_block(
    param, weight, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, offsets, count, rounding,
    grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, decay_factor,
    step_size,
    COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Returns the second moments whose mean is the schedule, as they are stored, and grad^2."""
    g = load_block(grad, offsets, count, COMPUTE, VECTOR)
    p = load_block(weight, offsets, count, COMPUTE, VECTOR)
    m = load_block(exp_avg, offsets, count, COMPUTE, VECTOR)
    v = load_block(exp_avg_sq, offsets, count, COMPUTE, VECTOR)
    largest = v
    if AMSGRAD:
        largest = load_block(max_exp_avg_sq, offsets, count, COMPUTE, VECTOR)
    p, m, v, largest, averaged, _ = update_element(
        p, m, v, largest, g, grad_scale, l2, from_grad, exp_avg_slope, beta2, one_minus_beta2,
        inv_sqrt_bias_correction2, eps, decay_factor, step_size, AMSGRAD,
    )  # fmt: skip
    if MASTER:
        store_block(weight, p, offsets, count, VECTOR)
    if STOCHASTIC:
        p = stochastically_rounded(p, rounding, offsets)
    store_block(param, p, offsets, count, VECTOR)
    store_block(exp_avg, m, offsets, count, VECTOR)
    store_block(exp_avg_sq, v, offsets, count, VECTOR)
    if AMSGRAD:
        store_block(max_exp_avg_sq, largest, offsets, count, VECTOR)
    # Without amsgrad max_exp_avg_sq has the dtype of exp_avg_sq, and nothing is read or written through it.
    return averaged.to(max_exp_avg_sq.dtype.element_ty).to(COMPUTE), g * g
