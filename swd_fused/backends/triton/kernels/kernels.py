"""The kernels: a whole step in one launch, or its passes one by one."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels.grid import is_last, wait_for_all
from swd_fused.backends.triton.kernels.passes import (
    advance_steps,
    gradient_sums,
    last_exp_avg_sq_sum,
    max_exp_avg_sq_sum,
    stored_sums,
    total_of,
    update,
)
from swd_fused.backends.triton.kernels.schedule import clip_factor, mean_of_sums
from swd_fused.backends.triton.kernels.tables import (
    CARRIED,
    EXP_AVG_SQ_MEAN,
    FRESH,
    GRAD_FACTOR,
    GRAD_NORM,
    GRAD_SUM,
    LAST_NUMEL,
    LAST_SUM,
    MAX_GRAD_NORM,
    MAX_SUM,
    MEAN,
    NUMEL,
    SKIP_NONFINITE,
    SKIPPED,
    SLOT_COLUMNS,
)


@triton.jit(do_not_specialize=["n_tensors"], do_not_specialize_on_alignment=["grad_scale", "found_inf"])
def exact_step_kernel(
    results, sums, slots, steps, counter, tensors, segments, program_segments, hyper, limits, grad_scale, found_inf,
    n_tensors,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    ADDS_L2: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Pass 1, the mean, pass 2. The grid must be resident as a whole."""
    gradient_sums(slots, sums, steps, tensors, segments, program_segments, hyper, GRAD, COMPUTE)
    wait_for_all(counter, 1)
    unscale = 1 / tl.load(grad_scale).to(tl.float64)
    grad_norm = unscale * tl.sqrt(total_of(slots, GRAD_SUM))
    grad_factor = unscale * clip_factor(grad_norm, tl.load(limits + MAX_GRAD_NORM))
    if AMSGRAD:
        max_exp_avg_sq_sum(
            slots, steps, tensors, segments, program_segments, hyper, grad_factor,
            GRAD, EXP_AVG_SQ, AVERAGED, COMPUTE, VECTOR, BLOCK, CODED,
        )  # fmt: skip
        wait_for_all(counter, 2)
        exp_avg_sq_mean = mean_of_sums(total_of(slots, MAX_SUM), 0.0, 1.0, tl.load(limits + NUMEL))
    else:
        carried, fresh = total_of(slots, CARRIED), total_of(slots, FRESH)
        exp_avg_sq_mean = mean_of_sums(carried, fresh, grad_factor, tl.load(limits + NUMEL))
    is_nonfinite = (grad_norm - grad_norm) != 0
    skip = (tl.load(found_inf) != 0) | ((tl.load(limits + SKIP_NONFINITE) != 0) & is_nonfinite)
    if tl.program_id(0) == 0:
        tl.store(results + EXP_AVG_SQ_MEAN, exp_avg_sq_mean)
        tl.store(results + GRAD_NORM, grad_norm)
        tl.store(results + SKIPPED, skip.to(tl.float64))
    slot = slots + tl.program_id(0) * SLOT_COLUMNS
    tl.store(slot + MEAN, exp_avg_sq_mean)
    tl.store(slot + GRAD_FACTOR, grad_factor)
    tl.debug_barrier()
    if not skip:
        update(
            sums, slots, steps, tensors, segments, program_segments, hyper, limits, slot + MEAN, slot + GRAD_FACTOR,
            PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, AVERAGED, WEIGHT, COMPUTE, AMSGRAD, MASTER, STOCHASTIC, ADDS_L2, False,
            VECTOR, BLOCK, CODED,
        )  # fmt: skip
    if is_last(counter, 3 if AMSGRAD else 2):
        if not skip:
            advance_steps(steps, tensors, n_tensors)


@triton.jit(do_not_specialize=["n_tensors", "n_segments"], do_not_specialize_on_alignment=["grad_scale", "found_inf"])
def lagged_step_kernel(
    results, sums, slots, steps, last, counter, tensors, segments, program_segments, hyper, limits, grad_scale,
    found_inf, n_tensors, n_segments,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    ADDS_L2: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Pass 2 with the mean of the sums that the launch before has left in `last`.

    Waits for nobody, so any grid will do.
    """
    exp_avg_sq_mean = mean_of_sums(tl.load(last + LAST_SUM), 0.0, 1.0, tl.load(last + LAST_NUMEL))
    unscale = 1 / tl.load(grad_scale).to(tl.float64)
    skip = tl.load(found_inf) != 0
    slot = slots + tl.program_id(0) * SLOT_COLUMNS
    tl.store(slot + MEAN, exp_avg_sq_mean)
    tl.store(slot + GRAD_FACTOR, unscale)
    tl.debug_barrier()
    if skip:
        gradient_sums(slots, sums, steps, tensors, segments, program_segments, hyper, GRAD, COMPUTE)
    else:
        update(
            sums, slots, steps, tensors, segments, program_segments, hyper, limits, slot + MEAN, slot + GRAD_FACTOR,
            PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, AVERAGED, WEIGHT, COMPUTE, AMSGRAD, MASTER, STOCHASTIC, ADDS_L2, True,
            VECTOR, BLOCK, CODED,
        )  # fmt: skip
    if is_last(counter, 1):
        if not skip:
            advance_steps(steps, tensors, n_tensors)
            tl.debug_barrier()
            total, numel = last_exp_avg_sq_sum(sums, steps, tensors, segments, hyper, n_segments)
            tl.store(last + LAST_SUM, total)
            tl.store(last + LAST_NUMEL, numel)
        tl.store(results + EXP_AVG_SQ_MEAN, exp_avg_sq_mean)
        tl.store(results + GRAD_NORM, unscale * tl.sqrt(total_of(slots, GRAD_SUM)))
        tl.store(results + SKIPPED, skip.to(tl.float64))


@triton.jit
def gradient_sums_kernel(
    totals, slots, counter, sums, steps, tensors, segments, program_segments, hyper,
    GRAD: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    gradient_sums(slots, sums, steps, tensors, segments, program_segments, hyper, GRAD, COMPUTE)
    if is_last(counter, 1):
        tl.store(totals + GRAD_SUM, total_of(slots, GRAD_SUM))
        tl.store(totals + CARRIED, total_of(slots, CARRIED))
        tl.store(totals + FRESH, total_of(slots, FRESH))


@triton.jit(do_not_specialize_on_alignment=["grad_factor"])
def max_exp_avg_sq_sum_kernel(
    totals, slots, counter, steps, tensors, segments, program_segments, hyper, grad_factor,
    GRAD: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    max_exp_avg_sq_sum(
        slots, steps, tensors, segments, program_segments, hyper, tl.load(grad_factor),
        GRAD, EXP_AVG_SQ, AVERAGED, COMPUTE, VECTOR, BLOCK, CODED,
    )  # fmt: skip
    if is_last(counter, 1):
        tl.store(totals + MAX_SUM, total_of(slots, MAX_SUM))


@triton.jit(do_not_specialize_on_alignment=["exp_avg_sq_mean", "grad_factor", "skip"])
def update_kernel(
    totals, sums, slots, counter, steps, tensors, segments, program_segments, hyper, limits, exp_avg_sq_mean,
    grad_factor, skip,
    PARAM: tl.constexpr, GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, AVERAGED: tl.constexpr,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    ADDS_L2: tl.constexpr, SUM_GRADS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Does not advance `steps`, which other launches of this step may still read."""
    if tl.load(skip) == 0:
        update(
            sums, slots, steps, tensors, segments, program_segments, hyper, limits, exp_avg_sq_mean, grad_factor,
            PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, AVERAGED, WEIGHT, COMPUTE, AMSGRAD, MASTER, STOCHASTIC, ADDS_L2,
            SUM_GRADS, VECTOR, BLOCK, CODED,
        )  # fmt: skip
    elif SUM_GRADS:
        gradient_sums(slots, sums, steps, tensors, segments, program_segments, hyper, GRAD, COMPUTE)
    if SUM_GRADS:
        if is_last(counter, 1):
            tl.store(totals + GRAD_SUM, total_of(slots, GRAD_SUM))


@triton.jit
def stored_sums_kernel(
    sums, steps, tensors, segments, program_segments, hyper,
    AVERAGED: tl.constexpr, COMPUTE: tl.constexpr, AMSGRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    stored_sums(
        sums, steps, tensors, segments, program_segments, hyper,
        AVERAGED, COMPUTE, AMSGRAD, VECTOR, BLOCK, CODED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_segments"])
def last_exp_avg_sq_sum_kernel(last, sums, steps, tensors, segments, hyper, n_segments):
    """One program."""
    total, numel = last_exp_avg_sq_sum(sums, steps, tensors, segments, hyper, n_segments)
    tl.store(last + LAST_SUM, total)
    tl.store(last + LAST_NUMEL, numel)
