"""What the host does in a step on a GPU, for many small tensors, with all launches left out. Needs no GPU.

FusedAdamS runs the Triton backend on CPU tensors, with nothing in the place of its launches. AdamW fused has nothing in
the place of its two operators. What these do on the host, tables and launches for every few tensors, is not counted.
Times are the thread's, so that other processes do not add to them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import thread_time
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.step_times import contenders
from benchmarks.step_times.contenders import GPU_CONTENDERS, PEER, parameters
from benchmarks.step_times.harness import Case, carry_out, command, timed
from benchmarks.step_times.suites import Suite

TENSORS, ELEMENTS = 1000, 16  # nothing is done with them
REPEATS = 401
PROGRAMS = 1056  # 8 for each multiprocessor of an H100
OURS = ("exact", "lagged", "exact + clip")
# AdamW last: the moments that are made last are where the caches serve them badly, and its step does not look at them.
# An exact step in that place took 1.6 times as long as in another.
COMPARED = [*(GPU_CONTENDERS[f"FusedAdamS {name} (triton)"] for name in OURS), GPU_CONTENDERS[PEER]]


@contextmanager
def without_launches() -> Iterator[None]:
    """Makes the Triton backend step CPU tensors: everything happens but what a GPU would do."""
    from swd_fused import backends
    from swd_fused.backends.triton import launch as triton_launch
    from swd_fused.backends.triton import plan as triton_plan

    def launch(self: object, programs: int, results: Tensor, *args: object) -> None:
        results.fill_(1.0)  # a mean that warns of nothing

    triton = backends.load_triton_backend()
    with (
        patch.object(triton_launch.Launcher, "__call__", launch),
        patch.object(triton_plan, "programs_on", lambda *_: PROGRAMS),
        patch.object(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(warp_size=32)),
        patch.object(backends, "choose", lambda *_: triton),
        patch.object(torch, "_fused_adamw_", lambda *_, **__: None),
        patch.object(torch, "_foreach_add_", lambda *_: None),
    ):
        yield


def move_gradients(params: Sequence[Tensor]) -> None:
    """Puts the same gradients at other addresses, in new tensors, as a backward pass does."""
    for param in params:
        assert param.grad is not None
        param.grad = param.grad.clone()


def case_of(suite: Suite, gradients: str) -> Case:
    params = parameters(suite.shapes)
    return contenders.case_of(
        "many-small",
        suite,
        COMPARED,
        # Clipping is compared with AdamW's step alone: it would launch more.
        peers={contender.name: PEER for contender in COMPARED},
        title=f"{len(params):,} tensors, gradients {gradients}",
        work=lambda: params,
        timer=partial(timed, clock=thread_time),
        before=partial(move_gradients, params) if "new" in gradients else lambda: None,
        more=lambda *_: {"gradients": gradients},
        device="none: launches left out",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("host_work", __doc__)
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 interprets kernels instead of launching them, so nothing can be left out.")
    options.threads = 1
    suite = Suite(((ELEMENTS,),) * (5 if options.quick else TENSORS), REPEATS)
    with without_launches():
        carry_out(options, [case_of(suite, gradients) for gradients in ("where they were", "at new addresses")])


if __name__ == "__main__":
    main()
