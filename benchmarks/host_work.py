"""What the host does in a step on a GPU, for many small tensors, with all launches left out. Needs no GPU.

FusedAdamS runs the Triton backend on CPU tensors, with nothing in the place of its launches. AdamW fused has nothing in
the place of its two operators. What these do on the host, tables and launches for every few tensors, is not counted.
Times are the thread's, so that other processes do not add to them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import positive
from benchmarks.conditions import conditions, write_rows
from benchmarks.contenders import MAX_GRAD_NORM, PEER, adamw, fused_adams, parameters
from benchmarks.other_load import OtherLoad, warn_of_other_load
from benchmarks.timing import WARM_UP_ROUNDS, Quartiles, interleaved_times, milliseconds, timed

Row = dict[str, Any]
Step = Callable[[], object]

ELEMENTS = 16  # of each tensor. Nothing is done with them
PROGRAMS = 1056  # 8 for each multiprocessor of an H100


@dataclass(frozen=True)
class HostContender:
    name: str
    build: Callable[[Sequence[Tensor]], Step]


CONTENDERS = (
    HostContender(PEER, adamw),
    HostContender("FusedAdamS exact (triton)", fused_adams("exact", "triton")),
    HostContender("FusedAdamS lagged (triton)", fused_adams("lagged", "triton")),
    HostContender("FusedAdamS exact + clip (triton)", fused_adams("exact", "triton", MAX_GRAD_NORM)),
)


@contextmanager
def without_launches() -> Iterator[None]:
    """The Triton backend for CPU tensors; everything happens but what a GPU would do."""
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
        patch.object(backends, "choose", lambda *_: (triton, "triton")),
        patch.object(torch, "_fused_adamw_", lambda *_, **__: None),
        patch.object(torch, "_foreach_add_", lambda *_: None),
    ):
        yield


def gradient_mover(params: Sequence[Tensor]) -> Callable[[], None]:
    """The same gradients at other addresses. A contender's next turn comes before they are back at any."""
    places = [
        [torch.clone(param.grad) for param in params if param.grad is not None] for _ in range(2 * len(CONTENDERS))
    ]
    rounds = cycle(places)

    def move() -> None:
        for param, grad in zip(params, next(rounds), strict=True):
            param.grad = grad

    return move


def measure(tensors: int, repeats: int, new_gradients: bool, progress: Progress) -> list[Row]:
    params = parameters([(ELEMENTS,)] * tensors)
    steps = [contender.build(params) for contender in CONTENDERS]
    before = gradient_mover(params) if new_gradients else lambda: None
    gradients = "at new addresses" if new_gradients else "where they were"
    task = progress.add_task(f"gradients {gradients}", total=repeats + WARM_UP_ROUNDS)
    other_load = OtherLoad()
    times = interleaved_times(
        steps, repeats, lambda: progress.advance(task), timer=partial(timed, clock=thread_time), before=before
    )
    seconds = {contender.name: Quartiles.of(values) for contender, values in zip(CONTENDERS, times, strict=True)}
    shared = conditions(other_load, device="none: launches left out")
    return [
        {
            "contender": contender.name,
            "gradients": gradients,
            "tensors": tensors,
            "repeats": repeats,
            "median_s": seconds[contender.name].median,
            "q1_s": seconds[contender.name].q1,
            "q3_s": seconds[contender.name].q3,
            "ratio": seconds[contender.name].median / seconds[PEER].median,
            "peer": PEER,
            **shared,
        }
        for contender in CONTENDERS
    ]


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"Host work in a step of {first['tensors']:,} tensors, launches left out, {first['repeats']} repeats"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    result.add_column("contender", no_wrap=True)
    result.add_column("gradients", no_wrap=True)
    for heading in ("median ms", "quartiles ms", "ratio to AdamW"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        median, q1, q3 = (milliseconds(row[key]) for key in ("median_s", "q1_s", "q3_s"))
        result.add_row(row["contender"], row["gradients"], median, f"{q1} - {q3}", f"{row['ratio']:.2f}")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_work", description=__doc__)
    parser.add_argument("--tensors", type=positive, default=1000, help="default: %(default)s")
    parser.add_argument("--repeats", type=positive, default=401, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("results/host_work"), metavar="DIR", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error(
            "TRITON_INTERPRET=1 interprets kernels instead of launching them, so there is nothing to leave out."
        )
    torch.set_num_threads(1)

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress, without_launches():
        for new_gradients in (False, True):
            rows += measure(options.tensors, options.repeats, new_gradients, progress)
    console.print(table(rows))
    warn_of_other_load(console, max(row["other_load"] or 0.0 for row in rows))
    csv_path = options.out / "host_work.csv"
    write_rows(csv_path, rows)
    console.print(f"Wrote {csv_path}", soft_wrap=True)


if __name__ == "__main__":
    main()
