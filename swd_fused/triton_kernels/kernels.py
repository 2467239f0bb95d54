"""The kernels: a whole step in one launch, or its passes one by one."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.triton_kernels.grid import is_last, wait_for_all
from swd_fused.triton_kernels.passes import (
    advance_steps,
    gradient_sums,
    last_exp_avg_sq_sum,
    max_exp_avg_sq_sum,
    stored_sums,
    total_of,
    update,
)
from swd_fused.triton_kernels.schedule import clip_factor
from swd_fused.triton_kernels.tables import (
    CARRIED,
    CLIP,
    EXP_AVG_SQ_MEAN,
    FRESH,
    GRAD_NORM,
    GRAD_SUM,
    LAST_NUMEL,
    LAST_SUM,
    MAX_GRAD_NORM,
    MAX_SUM,
    MEAN,
    NUMEL,
    SLOT_COLUMNS,
)


@triton.jit(do_not_specialize=["n_tensors"])
def exact_step_kernel(
    results, sums, slots, steps, counter, tensors, segments, program_segments, hyper, limits, n_tensors,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, COMPUTE: tl.constexpr,
    AMSGRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 1, the number, pass 2. The grid must be resident as a whole."""
    gradient_sums(slots, sums, steps, tensors, segments, program_segments, hyper, GRAD, COMPUTE, BLOCK)
    wait_for_all(counter, 1)
    grad_norm = tl.sqrt(total_of(slots, GRAD_SUM))
    clip = clip_factor(grad_norm, tl.load(limits + MAX_GRAD_NORM))
    if AMSGRAD:
        max_exp_avg_sq_sum(
            slots, steps, tensors, segments, program_segments, hyper, clip, GRAD, EXP_AVG_SQ, COMPUTE, VECTOR, BLOCK
        )
        wait_for_all(counter, 2)
        exp_avg_sq_sum = total_of(slots, MAX_SUM)
    else:
        exp_avg_sq_sum = total_of(slots, CARRIED) + clip * clip * total_of(slots, FRESH)
    exp_avg_sq_mean = exp_avg_sq_sum / tl.load(limits + NUMEL)
    if tl.program_id(0) == 0:
        tl.store(results + EXP_AVG_SQ_MEAN, exp_avg_sq_mean)
        tl.store(results + GRAD_NORM, grad_norm)
    # Through memory to the segments that need them, or they would take registers from every block in between.
    slot = slots + tl.program_id(0) * SLOT_COLUMNS
    tl.store(slot + MEAN, exp_avg_sq_mean)
    tl.store(slot + CLIP, clip)
    tl.debug_barrier()
    update(
        sums, slots, steps, tensors, segments, program_segments, hyper, slot + MEAN, slot + CLIP,
        PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, COMPUTE, AMSGRAD, False, VECTOR, BLOCK,
    )  # fmt: skip
    if is_last(counter, 3 if AMSGRAD else 2):
        advance_steps(steps, n_tensors)


@triton.jit(do_not_specialize=["n_tensors", "n_segments"])
def lagged_step_kernel(
    results, sums, slots, steps, last, counter, tensors, segments, program_segments, hyper, n_tensors, n_segments,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, COMPUTE: tl.constexpr,
    AMSGRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 2 with the number that the launch before has left in `last`. Waits for nobody, so any grid will do."""
    exp_avg_sq_mean = tl.load(last + LAST_SUM) / tl.maximum(tl.load(last + LAST_NUMEL), 1.0)
    slot = slots + tl.program_id(0) * SLOT_COLUMNS
    tl.store(slot + MEAN, exp_avg_sq_mean)
    tl.store(slot + CLIP, tl.full([], 1.0, tl.float64))
    tl.debug_barrier()
    update(
        sums, slots, steps, tensors, segments, program_segments, hyper, slot + MEAN, slot + CLIP,
        PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, COMPUTE, AMSGRAD, True, VECTOR, BLOCK,
    )  # fmt: skip
    if is_last(counter, 1):
        advance_steps(steps, n_tensors)
        tl.debug_barrier()
        total, number = last_exp_avg_sq_sum(sums, steps, tensors, segments, hyper, n_segments)
        tl.store(last + LAST_SUM, total)
        tl.store(last + LAST_NUMEL, number)
        tl.store(results + EXP_AVG_SQ_MEAN, exp_avg_sq_mean)
        tl.store(results + GRAD_NORM, tl.sqrt(total_of(slots, GRAD_SUM)))


@triton.jit
def gradient_sums_kernel(
    totals, slots, counter, sums, steps, tensors, segments, program_segments, hyper,
    GRAD: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gradient_sums(slots, sums, steps, tensors, segments, program_segments, hyper, GRAD, COMPUTE, BLOCK)
    if is_last(counter, 1):
        tl.store(totals + GRAD_SUM, total_of(slots, GRAD_SUM))
        tl.store(totals + CARRIED, total_of(slots, CARRIED))
        tl.store(totals + FRESH, total_of(slots, FRESH))


@triton.jit(do_not_specialize_on_alignment=["clip"])
def max_exp_avg_sq_sum_kernel(
    totals, slots, counter, steps, tensors, segments, program_segments, hyper, clip,
    GRAD: tl.constexpr, EXP_AVG_SQ: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    max_exp_avg_sq_sum(
        slots, steps, tensors, segments, program_segments, hyper, tl.load(clip),
        GRAD, EXP_AVG_SQ, COMPUTE, VECTOR, BLOCK,
    )  # fmt: skip
    if is_last(counter, 1):
        tl.store(totals + MAX_SUM, total_of(slots, MAX_SUM))


@triton.jit(do_not_specialize_on_alignment=["exp_avg_sq_mean", "clip"])
def update_kernel(
    totals, sums, slots, counter, steps, tensors, segments, program_segments, hyper, exp_avg_sq_mean, clip,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, COMPUTE: tl.constexpr,
    AMSGRAD: tl.constexpr, SUM_GRADS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Does not advance `steps`, which other launches of this step may still read."""
    update(
        sums, slots, steps, tensors, segments, program_segments, hyper, exp_avg_sq_mean, clip,
        PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, COMPUTE, AMSGRAD, SUM_GRADS, VECTOR, BLOCK,
    )  # fmt: skip
    if SUM_GRADS:
        if is_last(counter, 1):
            tl.store(totals + GRAD_SUM, total_of(slots, GRAD_SUM))


@triton.jit
def stored_sums_kernel(
    sums, tensors, segments, program_segments, hyper,
    EXP_AVG_SQ: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    stored_sums(sums, tensors, segments, program_segments, hyper, EXP_AVG_SQ, COMPUTE, AMSGRAD, VECTOR, BLOCK)


@triton.jit(do_not_specialize=["n_segments"])
def last_exp_avg_sq_sum_kernel(last, sums, steps, tensors, segments, hyper, n_segments):
    """One program."""
    total, number = last_exp_avg_sq_sum(sums, steps, tensors, segments, hyper, n_segments)
    tl.store(last + LAST_SUM, total)
    tl.store(last + LAST_NUMEL, number)
