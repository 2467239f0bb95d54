"""How the programs of a grid wait for one another, and how the last one knows that it is the last.

A counter counts arrivals: each program arrives once at each meeting, and whoever is last at the last one sets it back
to zero for the next launch. In the memory model arrivals release what a program wrote, and who has waited acquires it;
the barriers within a program extend both from its first thread to all of its threads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_all(counter, MEETING: tl.constexpr):
    """The first, second, ... MEETING of a launch. All programs must be resident, which a cooperative launch ensures."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    # Acquires once, since each acquire empties the caches that the program still works with. As a condition, or the
    # compiler would leave out a value that nobody uses.
    while tl.atomic_add(counter, 0, sem="relaxed", scope="gpu") < MEETING * tl.num_programs(0):
        pass
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < MEETING * tl.num_programs(0):
        pass
    tl.debug_barrier()


@triton.jit
def is_last(counter, MEETING: tl.constexpr):
    """Whether all others have arrived at this MEETING, the last one of the launch. Waits for nobody."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == MEETING * tl.num_programs(0) - 1
    tl.debug_barrier()
    if last:
        tl.store(counter, 0)
    return last
