"""The kernels: whole steps in one launch, and single passes."""

from __future__ import annotations

import triton
import triton.language as tl

from swd_fused.backends.triton.kernels import passes
from swd_fused.backends.triton.kernels.schedule import clip_factor, mean_of_sums
from swd_fused.backends.triton.kernels.tables import LAST, LIMIT, RESULT, SLOT, Tables


@triton.jit(do_not_specialize=["n_tensors"], do_not_specialize_on_alignment=["grad_scale", "found_inf"])
def exact_step_kernel(
    results, sums, slots, counter, steps, tensors, grads, segments, program_segments, hyper,
    limits, grad_scale, found_inf, n_tensors, CONFIG: tl.constexpr,
):  # fmt: skip
    """Runs pass 1, computes the mean, and runs pass 2. The whole grid must be resident."""
    tables = Tables(steps, tensors, grads, segments, program_segments, hyper)
    passes.gradient_sums(tables, sums, slots, CONFIG)
    wait_for_all(counter, 1)
    unscale = 1 / tl.load(grad_scale).to(tl.float64)
    grad_norm = unscale * tl.sqrt(passes.total_of(slots, SLOT.grad_sum))
    grad_factor = unscale * clip_factor(grad_norm, tl.load(limits + LIMIT.max_grad_norm))
    if CONFIG.amsgrad:
        passes.max_exp_avg_sq_sum(tables, sums, slots, grad_factor, CONFIG)
        wait_for_all(counter, 2)
        exp_avg_sq_mean = mean_of_sums(passes.total_of(slots, SLOT.max_sum), 0.0, 1.0, tl.load(limits + LIMIT.numel))
    else:
        carried, fresh = passes.total_of(slots, SLOT.carried), passes.total_of(slots, SLOT.fresh)
        exp_avg_sq_mean = mean_of_sums(carried, fresh, grad_factor, tl.load(limits + LIMIT.numel))
    is_nonfinite = (grad_norm - grad_norm) != 0
    skip = (tl.load(found_inf) != 0) | ((tl.load(limits + LIMIT.skip_nonfinite) != 0) & is_nonfinite)
    if tl.program_id(0) == 0:
        store_results(results, exp_avg_sq_mean, grad_norm, skip)
    slot = stored_in_slot(slots, exp_avg_sq_mean, grad_factor)
    if not skip:
        passes.update(tables, sums, slots, limits, slot + SLOT.mean, slot + SLOT.grad_factor, CONFIG, False)
    if is_last(counter, 3 if CONFIG.amsgrad else 2):
        if not skip:
            passes.advance_steps(tables, n_tensors)


@triton.jit(do_not_specialize=["n_tensors", "n_segments"], do_not_specialize_on_alignment=["grad_scale", "found_inf"])
def lagged_step_kernel(
    results, sums, slots, counter, last, steps, tensors, grads, segments, program_segments, hyper,
    limits, grad_scale, found_inf, n_tensors, n_segments, CONFIG: tl.constexpr,
):  # fmt: skip
    """Runs pass 2 with the mean of the sums that the launch before has left in `last`.

    No program waits for another, so the grid may have any size.
    """
    tables = Tables(steps, tensors, grads, segments, program_segments, hyper)
    exp_avg_sq_mean = mean_of_sums(tl.load(last + LAST.total), 0.0, 1.0, tl.load(last + LAST.numel))
    unscale = 1 / tl.load(grad_scale).to(tl.float64)
    skip = tl.load(found_inf) != 0
    slot = stored_in_slot(slots, exp_avg_sq_mean, unscale)
    if skip:
        passes.gradient_sums(tables, sums, slots, CONFIG)
    else:
        passes.update(tables, sums, slots, limits, slot + SLOT.mean, slot + SLOT.grad_factor, CONFIG, True)
    if is_last(counter, 1):
        if not skip:
            passes.advance_steps(tables, n_tensors)
            store_last(last, tables, sums, n_segments)
        store_results(results, exp_avg_sq_mean, unscale * tl.sqrt(passes.total_of(slots, SLOT.grad_sum)), skip)


@triton.jit
def gradient_sums_kernel(
    totals, sums, slots, counter, steps, tensors, grads, segments, program_segments, hyper, CONFIG: tl.constexpr
):  # fmt: skip
    passes.gradient_sums(Tables(steps, tensors, grads, segments, program_segments, hyper), sums, slots, CONFIG)
    if is_last(counter, 1):
        tl.store(totals + SLOT.grad_sum, passes.total_of(slots, SLOT.grad_sum))
        tl.store(totals + SLOT.carried, passes.total_of(slots, SLOT.carried))
        tl.store(totals + SLOT.fresh, passes.total_of(slots, SLOT.fresh))


@triton.jit(do_not_specialize_on_alignment=["grad_factor"])
def max_exp_avg_sq_sum_kernel(
    totals, sums, slots, counter, steps, tensors, grads, segments, program_segments, hyper,
    grad_factor, CONFIG: tl.constexpr,
):  # fmt: skip
    tables = Tables(steps, tensors, grads, segments, program_segments, hyper)
    passes.max_exp_avg_sq_sum(tables, sums, slots, tl.load(grad_factor), CONFIG)
    if is_last(counter, 1):
        tl.store(totals + SLOT.max_sum, passes.total_of(slots, SLOT.max_sum))


@triton.jit(do_not_specialize_on_alignment=["exp_avg_sq_mean", "grad_factor", "skip"])
def update_kernel(
    totals, sums, slots, counter, steps, tensors, grads, segments, program_segments, hyper,
    limits, exp_avg_sq_mean, grad_factor, skip, CONFIG: tl.constexpr, SUM_GRADS: tl.constexpr,
):  # fmt: skip
    """Runs pass 2. Does not advance `steps`, which other launches of this step may still read."""
    tables = Tables(steps, tensors, grads, segments, program_segments, hyper)
    if tl.load(skip) == 0:
        passes.update(tables, sums, slots, limits, exp_avg_sq_mean, grad_factor, CONFIG, SUM_GRADS)
    elif SUM_GRADS:
        passes.gradient_sums(tables, sums, slots, CONFIG)
    if SUM_GRADS:
        if is_last(counter, 1):
            tl.store(totals + SLOT.grad_sum, passes.total_of(slots, SLOT.grad_sum))


@triton.jit
def stored_sums_kernel(sums, steps, tensors, grads, segments, program_segments, hyper, CONFIG: tl.constexpr):
    passes.stored_sums(Tables(steps, tensors, grads, segments, program_segments, hyper), sums, CONFIG)


@triton.jit(do_not_specialize=["n_segments"])
def last_exp_avg_sq_sum_kernel(last, sums, steps, tensors, grads, segments, program_segments, hyper, n_segments):
    """Computes `last` in one program. Computes weights too, which may be missing, or left with other betas."""
    tables = Tables(steps, tensors, grads, segments, program_segments, hyper)
    passes.weigh_sums(tables, sums, n_segments)
    tl.debug_barrier()
    store_last(last, tables, sums, n_segments)


@triton.jit
def store_results(results, exp_avg_sq_mean, grad_norm, skip):
    tl.store(results + RESULT.exp_avg_sq_mean, exp_avg_sq_mean)
    tl.store(results + RESULT.grad_norm, grad_norm)
    tl.store(results + RESULT.skipped, skip.to(tl.float64))


@triton.jit
def store_last(last, tables, sums, n_segments):
    total, numel = passes.last_exp_avg_sq_sum(tables, sums, n_segments)
    tl.store(last + LAST.total, total)
    tl.store(last + LAST.numel, numel)


@triton.jit
def stored_in_slot(slots, exp_avg_sq_mean, grad_factor):
    """Stores both numbers in this program's slot, and returns it when all threads of the program can read them."""
    slot = slots + tl.program_id(0) * SLOT.columns
    tl.store(slot + SLOT.mean, exp_avg_sq_mean)
    tl.store(slot + SLOT.grad_factor, grad_factor)
    tl.debug_barrier()
    return slot


# --- Waiting of a grid's programs for one another, and finding the last one

# A counter counts arrivals: each program arrives once at each meeting, and the last one at the last meeting resets it
# to zero for the next launch. In the memory model an arrival releases a program's writes, and a program that has waited
# acquires them. The barriers within a program extend both from its first thread to all of its threads.


@triton.jit
def wait_for_all(counter, MEETING: tl.constexpr):
    """Waits at a launch's first, second, ... MEETING. All programs must be resident: the launch is cooperative."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    # Acquires once, since each acquire empties the caches that the program still works with. It is a condition because
    # the compiler would leave out an unused value.
    while tl.atomic_add(counter, 0, sem="relaxed", scope="gpu") < MEETING * tl.num_programs(0):
        pass
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < MEETING * tl.num_programs(0):
        pass
    tl.debug_barrier()


@triton.jit
def is_last(counter, MEETING: tl.constexpr):
    """Returns whether all others have arrived at this MEETING, the launch's last one. Does not wait for them."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == MEETING * tl.num_programs(0) - 1
    tl.debug_barrier()
    if last:
        tl.store(counter, 0)
    return last
