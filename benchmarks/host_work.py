"""What the host does in a step on a GPU, for many small tensors, with all launches left out. Needs no GPU.

FusedAdamS runs the Triton backend on CPU tensors, with nothing in the place of its launches. AdamW fused has nothing in
the place of its two operators. What these do on the host, tables and launches for every few tensors, is not counted.
Times are the thread's, so that other processes do not add to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from time import thread_time
from types import SimpleNamespace
from unittest.mock import patch

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.conditions import positive
from benchmarks.step_times.contenders import MAX_GRAD_NORM, PEER, Build, Step, adamw, fused_adams, parameters
from benchmarks.step_times.harness import Case, Row, carry_out, command, grouped, timed, times_table

ELEMENTS = 16  # of each tensor. Nothing is done with them
PROGRAMS = 1056  # 8 for each multiprocessor of an H100

CONTENDERS: dict[str, Build] = {
    PEER: adamw,
    "FusedAdamS exact (triton)": fused_adams(backend="triton"),
    "FusedAdamS lagged (triton)": fused_adams(schedule="lagged", backend="triton"),
    "FusedAdamS exact + clip (triton)": fused_adams(max_grad_norm=MAX_GRAD_NORM, backend="triton"),
}


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


def gradient_mover(params: Sequence[Tensor]) -> Callable[[], None]:
    """Returns what puts the same gradients at other addresses. A contender's next turn comes before they are back."""
    places = [
        [torch.clone(param.grad) for param in params if param.grad is not None] for _ in range(2 * len(CONTENDERS))
    ]
    rounds = cycle(places)

    def move() -> None:
        for param, grad in zip(params, next(rounds), strict=True):
            param.grad = grad

    return move


def case_of(tensors: int, repeats: int, new_gradients: bool) -> Case:
    params = parameters([(ELEMENTS,)] * tensors)

    def build() -> Mapping[str, Step]:
        return {name: make(params) for name, make in CONTENDERS.items()}

    gradients = "at new addresses" if new_gradients else "where they were"
    return Case(
        f"gradients {gradients}",
        {"gradients": gradients, "tensors": tensors},
        build,
        repeats,
        timer=partial(timed, clock=thread_time),
        before=gradient_mover(params) if new_gradients else lambda: None,
        device="none: launches left out",
    )


def tables(rows: Sequence[Row]) -> list[Table]:
    return [
        times_table(own, f"Host work in a step of {own[0]['tensors']:,} tensors, gradients {own[0]['gradients']}")
        for own in grouped(rows, "gradients")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("host_work", __doc__, repeats=401, threads=None)
    parser.add_argument("--tensors", type=positive, default=1000, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error(
            "TRITON_INTERPRET=1 interprets kernels instead of launching them, so there is nothing to leave out."
        )
    with without_launches():
        cases = [case_of(options.tensors, options.repeats, new_gradients) for new_gradients in (False, True)]
        carry_out("host_work", cases, options.out, tables, threads=1)


if __name__ == "__main__":
    main()
