"""What a step on shards costs beyond AdamW's, under FSDP2 on 2 and 4 ranks of this machine (gloo, loopback).

Ranks take one thread each. All contenders take turns; before each step all ranks wait for each other, and the time of
a step is that of the slowest rank. On fewer cores than ranks the operating system's scheduler is part of every number.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.arguments import positive
from benchmarks.conditions import conditions, write_rows
from benchmarks.contenders import MAX_GRAD_NORM, SCHEDULED_WEIGHT_DECAY, Step, adamw, fused_adams, with_clipping
from benchmarks.other_load import OtherLoad
from benchmarks.plot_sharded_step import plot
from benchmarks.suites import SUITES, Shape
from benchmarks.timing import WARM_UP_ROUNDS, Quartiles, interleaved_order, timed
from swd_fused import FusedAdamS

Row = dict[str, Any]

ADAMW, CLIPPED = "AdamW fused", "AdamW fused + clip_grad_norm_"
START_SECONDS = 120


def known_sum(params: Sequence[Tensor]) -> Step:
    """What the step costs where the norm is known already: nothing is read twice, nothing is sent."""
    optimizer = FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY)
    numel = sum(param.numel() for param in params)
    return partial(optimizer.step, grad_sumsq=1.0, numel=numel)


def on_local_tensors(build: Callable[[Sequence[Tensor]], Step]) -> Callable[[Sequence[Tensor]], Step]:
    """Without DTensors: AdamW loses their overhead, FusedAdamS the all-reduce, so that it computes something else."""

    def build_on_local_tensors(params: Sequence[Any]) -> Step:
        locals_ = [nn.Parameter(param.to_local().detach()) for param in params]
        for local, param in zip(locals_, params, strict=True):
            local.grad = param.grad.to_local()
        return build(locals_)

    return build_on_local_tensors


def bare_all_reduce(params: Sequence[Tensor]) -> Step:
    return partial(dist.all_reduce, torch.zeros(4, dtype=torch.float64))


# By name: how its step is made, and what its time is compared with.
CONTENDERS: dict[str, tuple[Callable[[Sequence[Tensor]], Step], str]] = {
    ADAMW: (adamw, ADAMW),
    "FusedAdamS exact": (fused_adams("exact", "auto"), ADAMW),
    "FusedAdamS lagged": (fused_adams("lagged", "auto"), ADAMW),
    "FusedAdamS, sum known": (known_sum, ADAMW),
    "AdamW fused, local tensors": (on_local_tensors(adamw), ADAMW),
    "FusedAdamS, own shard only (wrong)": (on_local_tensors(fused_adams("exact", "auto")), ADAMW),
    CLIPPED: (with_clipping(adamw), CLIPPED),
    "FusedAdamS exact + clip": (fused_adams("exact", "auto", MAX_GRAD_NORM), CLIPPED),
    "all-reduce of 4 numbers": (bare_all_reduce, ADAMW),
}


class Shapes(nn.Module):
    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.params = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


def sharded_parameters(shapes: Sequence[Shape]) -> list[Tensor]:
    """As `benchmarks.contenders.parameters` makes them, with gradients of norm 1, sharded by FSDP2."""
    model = Shapes(shapes)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    params = list(model.parameters())
    rms = sum(param.numel() for param in params) ** -0.5
    for param in params:
        param.grad = torch.zeros_like(param)
        param.grad.to_local().normal_(std=rms)
    return params


def measure_on_rank(
    rank: int, ranks: int, start: str, names: Sequence[str], shapes: Sequence[Shape], repeats: int, answers: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(start, ranks)
    timeout = timedelta(seconds=START_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    params = sharded_parameters(shapes)
    steps = [CONTENDERS[name][0](params) for name in names]
    times = torch.zeros(len(names), repeats, dtype=torch.float64)
    for repetition in range(-WARM_UP_ROUNDS, repeats):
        for index in interleaved_order(range(len(steps)), repetition):
            dist.barrier()
            seconds = timed(steps[index])
            if repetition >= 0:
                times[index, repetition] = seconds
        if rank == 0:
            answers.put(None)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if rank == 0:
        answers.put(times.tolist())
    dist.destroy_process_group()


def times_of(
    ranks: int, names: Sequence[str], shapes: Sequence[Shape], repeats: int, on_round: Callable[[], object]
) -> list[list[float]]:
    """Seconds of each contender in each round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "swd_fused"])
    with tempfile.TemporaryDirectory() as directory:
        answers: Any = context.Queue()
        arguments = ranks, str(Path(directory) / "start"), names, shapes, repeats, answers
        processes = [
            context.Process(target=measure_on_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            while (answer := answers.get(timeout=2 * START_SECONDS)) is None:
                on_round()
        finally:
            for process in processes:
                process.join(timeout=START_SECONDS)
                process.kill()
    result: list[list[float]] = answer
    return result


def measure(ranks: int, suite: str, names: Sequence[str], repeats: int, progress: Progress) -> list[Row]:
    task = progress.add_task(f"{suite} on {ranks} ranks", total=repeats + WARM_UP_ROUNDS)
    other_load = OtherLoad()
    shapes = SUITES[suite].shapes
    times = dict(zip(names, times_of(ranks, names, shapes, repeats, partial(progress.advance, task)), strict=True))
    # Its own ranks are other processes too, so what they used cannot be told from what others did.
    shared = {**conditions(other_load), "threads": 1, "other_load": None}
    result = []
    for name in names:
        peer = CONTENDERS[name][1]
        seconds = Quartiles.of(times[name])
        # Both of a round ran within moments of each other, so their difference is steadier than either.
        added = Quartiles.of([own - other for own, other in zip(times[name], times[peer], strict=True)])
        result.append(
            {
                "ranks": ranks,
                "suite": suite,
                "contender": name,
                "peer": peer,
                "elements": SUITES[suite].elements,
                "tensors": len(shapes),
                "dtype": "float32",
                "repeats": repeats,
                "median_s": seconds.median,
                "q1_s": seconds.q1,
                "q3_s": seconds.q3,
                "added_s": added.median,
                "added_q1_s": added.q1,
                "added_q3_s": added.q3,
                "ratio": seconds.median / Quartiles.of(times[peer]).median,
                "load_average": os.getloadavg()[0],
                **shared,
            }
        )
    return result


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = (
        f"{first['suite']} on {first['ranks']} ranks: {first['elements']:,} elements in {first['tensors']:,} tensors, "
        f"{first['repeats']} repeats, load average {first['load_average']:.1f} on {first['cores']} cores"
    )
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    result.add_column("contender", no_wrap=True)
    for heading in ("median ms", "ratio", "added ms", "quartiles ms"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        added, low, high = (f"{1e3 * row[key]:+.1f}" for key in ("added_s", "added_q1_s", "added_q3_s"))
        own, ratio = f"{1e3 * row['median_s']:.1f}", f"{row['ratio']:.2f}"
        result.add_row(str(row["contender"]), own, ratio, added, f"{low} - {high}")
    return result


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.sharded_step", description=__doc__)
    result.add_argument("--ranks", action="append", type=positive, help="repeatable; default: 2 and 4")
    result.add_argument(
        "--suite", action="append", choices=list(SUITES), help="repeatable; default: resnet50, 1000x500"
    )
    result.add_argument("--repeats", type=positive, default=40, help="default: %(default)s")
    out = Path("results/sharded_step")
    result.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    console = Console()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for suite in options.suite or ["resnet50", "1000x500"]:
            for ranks in options.ranks or [2, 4]:
                suite_rows = measure(ranks, suite, list(CONTENDERS), options.repeats, progress)
                progress.console.print(table(suite_rows))
                rows += suite_rows
    csv_path = options.out / "sharded_step.csv"
    write_rows(csv_path, rows)
    console.print(f"Wrote {csv_path} and {plot(csv_path)}", soft_wrap=True)


if __name__ == "__main__":
    main()
