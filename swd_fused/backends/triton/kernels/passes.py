"""Both passes, each over one program's segments, and the sums over all programs."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels import segments
from swd_fused.backends.triton.kernels.schedule import bias_correction, decay_factor
from swd_fused.backends.triton.kernels.tables import (
    HYPER,
    NO_GRAD,
    SEGMENT,
    SLOT,
    SUM,
    TENSOR,
    has_grad,
    segment_at,
    segments_of_program,
)

# How many rows of a table are added at once.
ROWS = tl.constexpr(128)

# How many times ROWS are loaded at once at the end of a lagged step.
BLOCKS_OF_ROWS = tl.constexpr(4)


# One thread for each segment computes the numbers that follow from steps and hyper-parameters. If all threads did so
# for each segment, it would take most of the time of small tensors: these numbers are in float64, which has a 32nd of
# float32's rate on a T4, and a 64th on an RTX 4090.


@triton.jit
def prepare_sums(tables, sums):
    """Stores in `sums` the columns that pass 1 reads for this program's segments."""
    first, end = segments_of_program(tables)
    for begin in range(first, end, ROWS):
        index = begin + tl.arange(0, ROWS)
        row = sums + index * SUM.columns
        steps, hyper_row, _ = scalars_at(tables, index, index < end)
        beta2 = tl.load(hyper_row + HYPER.beta2)
        bias_correction2 = bias_correction(beta2, steps, tl.max(steps), tl.load(hyper_row + HYPER.corrects_bias))
        carried = beta2 * tl.load(row + SUM.total, mask=index < end, other=0.0) / bias_correction2
        tl.store(row + SUM.bias_correction2, bias_correction2, mask=index < end)
        tl.store(row + SUM.carried, carried, mask=index < end)
    tl.debug_barrier()


@triton.jit
def prepare_update(tables, sums, exp_avg_sq_mean, SUM_GRADS: tl.constexpr):
    """Stores in `sums` the columns that pass 2 reads for this program's segments, and with SUM_GRADS, in lagged steps,
    the weights of the sums that it will leave."""
    first, end = segments_of_program(tables)
    for begin in range(first, end, ROWS):
        index = begin + tl.arange(0, ROWS)
        row = sums + index * SUM.columns
        steps, hyper_row, grad = scalars_at(tables, index, index < end)
        longest, corrects_bias = tl.max(steps), tl.load(hyper_row + HYPER.corrects_bias)
        bias_correction1 = bias_correction(tl.load(hyper_row + HYPER.beta1), steps, longest, corrects_bias)
        tl.store(row + SUM.step_size, tl.load(hyper_row + HYPER.lr) / bias_correction1, mask=index < end)
        bias_correction2 = bias_correction(tl.load(hyper_row + HYPER.beta2), steps, longest, corrects_bias)
        tl.store(row + SUM.inv_sqrt_bias_correction2, 1 / tl.sqrt(bias_correction2), mask=index < end)
        tl.store(row + SUM.decay_factor, decay_factor(exp_avg_sq_mean, hyper_row), mask=index < end)
        if SUM_GRADS:
            is_updated = (index < end) & (tl.load(grad) != NO_GRAD)
            tl.store(row + SUM.weight, 1 / bias_correction2, mask=is_updated)
    tl.debug_barrier()


@triton.jit
def scalars_at(tables, index, mask):
    """Returns for several segments the number of this step, and pointers to hyper-parameters and gradients."""
    tensor = tl.load(tables.segments + index * SEGMENT.columns + SEGMENT.tensor, mask=mask, other=0)
    group = tl.load(tables.tensors + tensor * TENSOR.columns + TENSOR.group)
    return tl.load(tables.steps + tensor) + 1, tables.hyper + group * HYPER.columns, tables.grads + tensor


@triton.jit
def gradient_sums(tables, sums, slots, CONFIG: tl.constexpr):
    """Runs pass 1, into this program's slot. The sum of v^ after this step is carried + grad_factor^2 fresh."""
    prepare_sums(tables, sums)
    grad_sum = tl.zeros([], tl.float64)
    carried = tl.zeros([], tl.float64)
    fresh = tl.zeros([], tl.float64)
    first, end = segments_of_program(tables)
    for index in range(first, end):
        segment = segment_at(tables, index)
        if has_grad(segment):
            squares = segments.sum_of_squares(segment, CONFIG.grad, CONFIG.compute)
            # Scalars after the sum, or they would take registers from it.
            row = sums + index * SUM.columns
            grad_sum += squares
            carried += tl.load(row + SUM.carried)
            fresh += (1 - tl.load(segment.hyper_row + HYPER.beta2)) * squares / tl.load(row + SUM.bias_correction2)
    slot = slots + tl.program_id(0) * SLOT.columns
    tl.store(slot + SLOT.grad_sum, grad_sum)
    tl.store(slot + SLOT.carried, carried)
    tl.store(slot + SLOT.fresh, fresh)


@triton.jit
def max_exp_avg_sq_sum(tables, sums, slots, grad_factor, CONFIG: tl.constexpr):
    """Sums v^ after this step for amsgrad, by reading all moments: its maxima have no recursion for their sum."""
    prepare_sums(tables, sums)
    total = tl.zeros([], tl.float64)
    first, end = segments_of_program(tables)
    for index in range(first, end):
        segment = segment_at(tables, index)
        if has_grad(segment):
            maxima = segments.sum_of_next_max(segment, grad_factor, CONFIG)
            total += maxima / tl.load(sums + index * SUM.columns + SUM.bias_correction2)
    tl.store(slots + tl.program_id(0) * SLOT.columns + SLOT.max_sum, total)


@triton.jit
def update(
    tables, sums, slots, limits, exp_avg_sq_mean, grad_factor, CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr
):  # fmt: skip
    """Runs pass 2, given pointers to the mean and to the gradients' factor. Leaves the `sums` for the next step.

    The mean and the factor are read from memory, since as arguments they would take registers during every block.
    """
    prepare_update(tables, sums, tl.load(exp_avg_sq_mean), SUM_GRADS)
    first, end = segments_of_program(tables)
    grad_sum = tl.zeros([], tl.float64)
    for i in range(end - first):
        index = end - 1 - i
        segment = segment_at(tables, index)
        row = sums + index * SUM.columns
        if has_grad(segment):
            step = tl.load(tables.steps + segment.tensor) + 1
            total, squares = segments.update_segment(
                segment, row, step, tl.load(grad_factor), limits, CONFIG, SUM_GRADS
            )
            # Read again, since the first one would take registers during every block in between.
            updated = segment_at(tables, index)
            tl.store(row + SUM.total, total)
            tl.store(row + SUM.step, tl.load(tables.steps + updated.tensor) + 1)
            if SUM_GRADS:
                grad_sum += segments.kept_squares(squares, updated, CONFIG.grad, CONFIG.compute)
    if SUM_GRADS:
        tl.store(slots + tl.program_id(0) * SLOT.columns + SLOT.grad_sum, grad_sum)


@triton.jit
def stored_sums(tables, sums, CONFIG: tl.constexpr):
    """Computes rows of `sums` that are out of date from stored second moments, as `update` leaves them."""
    first, end = segments_of_program(tables)
    for index in range(first, end):
        segment = segment_at(tables, index)
        row = sums + index * SUM.columns
        step = tl.load(tables.steps + segment.tensor).to(tl.float64)
        if tl.load(row + SUM.step) != step:
            tl.store(row + SUM.total, segments.sum_of_stored(segment, CONFIG))
            tl.store(row + SUM.step, step)


@triton.jit
def total_of(slots, COLUMN: tl.constexpr):
    """Returns a column's sum over all programs, added in the same order by every program."""
    lanes = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float64)
    for begin in range(0, tl.num_programs(0), ROWS):
        rows = begin + lanes
        total += tl.load(slots + rows * SLOT.columns + COLUMN, mask=rows < tl.num_programs(0), other=0.0)
    return tl.sum(total)


@triton.jit
def weigh_sums(tables, sums, n_segments):
    """Computes the weights that a lagged step leaves in `sums`, also for tensors without a gradient."""
    lanes = tl.arange(0, ROWS)
    for begin in range(0, n_segments, ROWS):
        mask = begin + lanes < n_segments
        tensor = tl.load(tables.segments + (begin + lanes) * SEGMENT.columns + SEGMENT.tensor, mask=mask, other=0)
        group = tl.load(tables.tensors + tensor * TENSOR.columns + TENSOR.group, mask=mask, other=0)
        beta2 = tl.load(tables.hyper + group * HYPER.columns + HYPER.beta2, mask=mask, other=0.0)
        corrects_bias = tl.load(tables.hyper + group * HYPER.columns + HYPER.corrects_bias, mask=mask, other=0.0)
        step = tl.load(tables.steps + tensor, mask=mask, other=0.0)
        bias_correction2 = bias_correction(beta2, step, tl.max(step), corrects_bias)
        weight = tl.where(step > 0, 1 / tl.where(step > 0, bias_correction2, 1.0), 0.0)
        tl.store(sums + (begin + lanes) * SUM.columns + SUM.weight, weight, mask=mask)


@triton.jit
def last_exp_avg_sq_sum(tables, sums, n_segments):
    """Returns the sum of v^ as the step before left it, and its count, over tensors that have taken a step.

    One program adds all segments after the others have finished, so no load waits for another, and several are in
    flight. Longer blocks would make their layout among threads, and so the order of additions, depend on the kernel.
    """
    lanes = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float64)
    numel = tl.zeros([ROWS], tl.float64)
    for begin in range(0, n_segments, BLOCKS_OF_ROWS * ROWS):
        for block in tl.static_range(BLOCKS_OF_ROWS):
            index = begin + block * ROWS + lanes
            mask = index < n_segments
            exp_avg_sq_sum = tl.load(sums + index * SUM.columns + SUM.total, mask=mask, other=0.0)
            weight = tl.load(sums + index * SUM.columns + SUM.weight, mask=mask, other=0.0)
            length = tl.load(tables.segments + index * SEGMENT.columns + SEGMENT.length, mask=mask, other=0)
            total += tl.where(weight > 0, weight * exp_avg_sq_sum, 0.0)
            numel += tl.where(weight > 0, length, 0).to(tl.float64)
    return tl.sum(total), tl.sum(numel)


@triton.jit
def advance_steps(tables, n_tensors):
    """Counts the step of each tensor that has a gradient."""
    lanes = tl.arange(0, ROWS)
    for begin in range(0, n_tensors, ROWS):
        where = tables.steps + begin + lanes
        mask = begin + lanes < n_tensors
        grads = tl.load(tables.grads + begin + lanes, mask=mask, other=NO_GRAD)
        tl.store(where, tl.load(where, mask=mask) + 1, mask=mask & (grads != NO_GRAD))
