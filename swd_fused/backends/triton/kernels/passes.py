"""Both passes, each over one program's segments, and the sums of what the programs found."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.coded_segments import sum_of_coded, sum_of_next_max_coded, update_coded_segment
from swd_fused.backends.triton.kernels.memory import codec_of, segment_of
from swd_fused.backends.triton.kernels.schedule import bias_correction
from swd_fused.backends.triton.kernels.segments import (
    kept_squares,
    sum_of_next_max,
    sum_of_squares,
    sum_of_stored,
    update_segment,
)
from swd_fused.backends.triton.kernels.tables import CODEC, HYPER, LIMIT, SEGMENT, SLOT, SUM, TENSOR

# Rows of a table that are added at once.
ROWS = tl.constexpr(128)


@triton.jit
def gradient_sums(
    slots, sums, steps, tensors, segments, program_segments, hyper, GRAD: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Pass 1, into this program's slot: the sum of v^ after this step is carried + clip^2 fresh."""
    program = tl.program_id(0)
    grad_sum = tl.zeros([], tl.float64)
    carried = tl.zeros([], tl.float64)
    fresh = tl.zeros([], tl.float64)
    for segment in range(tl.load(program_segments + program), tl.load(program_segments + program + 1)):
        tensor, tensor_row, hyper_row, start, count = segment_of(tensors, segments, hyper, segment)
        if has_grad(tensor_row):
            squares = sum_of_squares(tensor_row, start, count, GRAD, COMPUTE)
            # Scalars after the sum, or they would take registers from it.
            step = tl.load(steps + tensor) + 1
            beta2 = tl.load(hyper_row + HYPER.beta2)
            bias_correction2 = bias_correction(beta2, step, step, tl.load(hyper_row + HYPER.corrects_bias))
            grad_sum += squares
            carried += beta2 * tl.load(sums + segment * SUM.columns + SUM.total) / bias_correction2
            fresh += (1 - beta2) * squares / bias_correction2
    slot = slots + program * SLOT.columns
    tl.store(slot + SLOT.grad_sum, grad_sum)
    tl.store(slot + SLOT.carried, carried)
    tl.store(slot + SLOT.fresh, fresh)


@triton.jit
def max_exp_avg_sq_sum(
    slots, steps, tensors, segments, program_segments, hyper, grad_factor,
    GRAD: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Pass 1 of amsgrad, whose maxima have no such recursion: the sum of v^ after this step."""
    program = tl.program_id(0)
    total = tl.zeros([], tl.float64)
    for segment in range(tl.load(program_segments + program), tl.load(program_segments + program + 1)):
        tensor, tensor_row, hyper_row, start, count = segment_of(tensors, segments, hyper, segment)
        if has_grad(tensor_row):
            step = tl.load(steps + tensor) + 1
            codec_row = codec_of(tensors, tensor)
            if CODED != 0 and has_codes(codec_row):
                maxima = sum_of_next_max_coded(
                    tensor_row, codec_row, hyper_row, start, count, grad_factor, GRAD, AVERAGED, COMPUTE, VECTOR, CODED
                )
            else:
                maxima = sum_of_next_max(
                    tensor_row, hyper_row, start, count, grad_factor, GRAD, EXP_AVG_SQ, AVERAGED, COMPUTE, VECTOR, BLOCK
                )
            corrects_bias = tl.load(hyper_row + HYPER.corrects_bias)
            total += maxima / bias_correction(tl.load(hyper_row + HYPER.beta2), step, step, corrects_bias)
    tl.store(slots + program * SLOT.columns + SLOT.max_sum, total)


@triton.jit
def update(
    sums, slots, steps, tensors, segments, program_segments, hyper, limits, exp_avg_sq_mean, grad_factor,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    ADDS_L2: tl.constexpr, SUM_GRADS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Pass 2, with pointers to the mean and to what gradients are multiplied by. Leaves the `sums` of the next step.

    The mean and the factor come through memory, or they would take registers from every block in between.
    """
    program = tl.program_id(0)
    first, end = tl.load(program_segments + program), tl.load(program_segments + program + 1)
    grad_sum = tl.zeros([], tl.float64)
    for i in range(end - first):
        segment = end - 1 - i
        tensor, tensor_row, hyper_row, start, count = segment_of(tensors, segments, hyper, segment)
        if has_grad(tensor_row):
            step = tl.load(steps + tensor) + 1
            codec_row = codec_of(tensors, tensor)
            if CODED != 0 and has_codes(codec_row):
                total, squares = update_coded_segment(
                    tensor_row, codec_row, hyper_row, start, count, step, tl.load(exp_avg_sq_mean),
                    tl.load(grad_factor), tl.load(limits + LIMIT.rounding_start),
                    PARAM, GRAD, AVERAGED, WEIGHT, COMPUTE, AMSGRAD, MASTER, STOCHASTIC, ADDS_L2, SUM_GRADS, VECTOR,
                    CODED,
                )  # fmt: skip
            else:
                total, squares = update_segment(
                    tensor_row, hyper_row, start, count, step, tl.load(exp_avg_sq_mean), tl.load(grad_factor),
                    tl.load(limits + LIMIT.rounding_start),
                    PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, AVERAGED, WEIGHT, COMPUTE, AMSGRAD, MASTER, STOCHASTIC, ADDS_L2,
                    SUM_GRADS, VECTOR, BLOCK,
                )  # fmt: skip
            # Read once more, or it would take registers from every block in between.
            tensor, tensor_row, _, start, count = segment_of(tensors, segments, hyper, segment)
            tl.store(sums + segment * SUM.columns + SUM.total, total)
            tl.store(sums + segment * SUM.columns + SUM.step, tl.load(steps + tensor) + 1)
            if SUM_GRADS:
                grad_sum += kept_squares(squares, tensor_row, start, count, GRAD, COMPUTE)
    if SUM_GRADS:
        tl.store(slots + program * SLOT.columns + SLOT.grad_sum, grad_sum)


@triton.jit
def stored_sums(
    sums, steps, tensors, segments, program_segments, hyper,
    AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """Finds what `update` leaves in `sums` from the second moments as they are stored, where `sums` is out of date."""
    program = tl.program_id(0)
    for segment in range(tl.load(program_segments + program), tl.load(program_segments + program + 1)):
        tensor, tensor_row, _, start, count = segment_of(tensors, segments, hyper, segment)
        row = sums + segment * SUM.columns
        step = tl.load(steps + tensor).to(tl.float64)
        if tl.load(row + SUM.step) != step:
            codec_row = codec_of(tensors, tensor)
            if CODED != 0 and has_codes(codec_row):
                total = sum_of_coded(tensor_row, codec_row, start, count, AVERAGED, COMPUTE, AMSGRAD, VECTOR, CODED)
            else:
                total = sum_of_stored(tensor_row, start, count, AVERAGED, COMPUTE, AMSGRAD, VECTOR, BLOCK)
            tl.store(row + SUM.total, total)
            tl.store(row + SUM.step, step)


@triton.jit
def total_of(slots, COLUMN: tl.constexpr):
    """Over all programs, in the same order whichever program asks."""
    lanes = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float64)
    for begin in range(0, tl.num_programs(0), ROWS):
        rows = begin + lanes
        total += tl.load(slots + rows * SLOT.columns + COLUMN, mask=rows < tl.num_programs(0), other=0.0)
    return tl.sum(total)


@triton.jit
def last_exp_avg_sq_sum(sums, steps, tensors, segments, hyper, n_segments):
    """The sum of v^ as the step before left it, and its count, over tensors that have taken a step."""
    lanes = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float64)
    numel = tl.zeros([ROWS], tl.float64)
    for begin in range(0, n_segments, ROWS):
        mask = begin + lanes < n_segments
        rows = segments + (begin + lanes) * SEGMENT.columns
        tensor = tl.load(rows + SEGMENT.tensor, mask=mask, other=0)
        group = tl.load(tensors + tensor * TENSOR.columns + TENSOR.group, mask=mask, other=0)
        beta2 = tl.load(hyper + group * HYPER.columns + HYPER.beta2, mask=mask, other=0.0)
        step = tl.load(steps + tensor, mask=mask, other=0.0)
        corrects_bias = tl.load(hyper + group * HYPER.columns + HYPER.corrects_bias, mask=mask, other=0.0)
        bias_correction2 = bias_correction(beta2, step, tl.max(step), corrects_bias)
        stepped = step > 0
        exp_avg_sq_sum = tl.load(sums + (begin + lanes) * SUM.columns + SUM.total, mask=mask, other=0.0)
        total += tl.where(stepped, exp_avg_sq_sum / tl.where(stepped, bias_correction2, 1.0), 0.0)
        numel += tl.where(stepped, tl.load(rows + SEGMENT.length, mask=mask, other=0), 0).to(tl.float64)
    return tl.sum(total), tl.sum(numel)


@triton.jit
def advance_steps(steps, tensors, n_tensors):
    """Counts the step of each tensor that has a gradient."""
    lanes = tl.arange(0, ROWS)
    for begin in range(0, n_tensors, ROWS):
        where = steps + begin + lanes
        mask = begin + lanes < n_tensors
        mask = mask & (tl.load(tensors + (begin + lanes) * TENSOR.columns + TENSOR.grad, mask=mask, other=-1) != -1)
        tl.store(where, tl.load(where, mask=mask) + 1, mask=mask)


@triton.jit
def has_grad(tensor_row):
    """Whether the tensor takes part in the step: address_table.NO_GRAD stands for a gradient that is not there."""
    return tl.load(tensor_row + TENSOR.grad) != -1


@triton.jit
def has_codes(codec_row):
    """Whether a tensor's moments are kept in 8 bits. CODED: how many blocks are taken at once, 0 if none has codes."""
    return tl.load(codec_row + CODEC.blocks_per_row) != 0
