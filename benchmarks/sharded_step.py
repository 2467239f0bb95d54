"""What a step on shards costs beyond AdamW's, under FSDP2 on 2 and 4 ranks of this machine (gloo, loopback).

Ranks take one thread each. All contenders take turns; before each step all ranks wait for each other, and the time of
a step is that of the slowest rank. On fewer cores than ranks the operating system's scheduler is part of every number.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.conditions import positive
from benchmarks.step_times.contenders import (
    CLIPPED_PEER,
    MAX_GRAD_NORM,
    PEER,
    SCHEDULED_WEIGHT_DECAY,
    Build,
    Step,
    adamw,
    fused_adams,
    with_clipping,
)
from benchmarks.step_times.harness import (
    Case,
    Quartiles,
    Row,
    carry_out,
    command,
    grouped,
    interleaved_times,
    table,
)
from benchmarks.step_times.pictures import plot_sharded_step
from benchmarks.step_times.suites import SUITES, Shape
from swd_fused import FusedAdamS

START_SECONDS = 120
DEFAULT_SUITES = ["resnet50", "1000x500"]


def known_sum(params: Sequence[Tensor]) -> Step:
    """Builds the step whose norm is known already: nothing is read twice, nothing is sent."""
    optimizer = FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY)
    numel = sum(param.numel() for param in params)
    return partial(optimizer.step, grad_sumsq=1.0, numel=numel)


def on_local_tensors(build: Build) -> Build:
    """Without DTensors: AdamW loses their overhead, FusedAdamS the all-reduce, so that it computes something else."""

    def build_on_local_tensors(params: Sequence[Any]) -> Step:
        locals_ = [nn.Parameter(param.to_local().detach()) for param in params]
        for local, param in zip(locals_, params, strict=True):
            local.grad = param.grad.to_local()
        return build(locals_)

    return build_on_local_tensors


def bare_all_reduce(params: Sequence[Tensor]) -> Step:
    return partial(dist.all_reduce, torch.zeros(4, dtype=torch.float64))


CONTENDERS: dict[str, Build] = {
    PEER: adamw,
    "FusedAdamS exact": fused_adams(),
    "FusedAdamS lagged": fused_adams(schedule="lagged"),
    "FusedAdamS, sum known": known_sum,
    "AdamW fused, local tensors": on_local_tensors(adamw),
    "FusedAdamS, own shard only (wrong)": on_local_tensors(fused_adams()),
    CLIPPED_PEER: with_clipping(adamw),
    "FusedAdamS exact + clip": fused_adams(max_grad_norm=MAX_GRAD_NORM),
    "all-reduce of 4 numbers": bare_all_reduce,
}
PEERS = {CLIPPED_PEER: CLIPPED_PEER, "FusedAdamS exact + clip": CLIPPED_PEER}


class Shapes(nn.Module):
    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.params = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


def sharded_parameters(shapes: Sequence[Shape]) -> list[Tensor]:
    """Returns parameters with gradients of norm 1, as `contenders.parameters` does, sharded by FSDP2."""
    model = Shapes(shapes)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    params = list(model.parameters())
    rms = sum(param.numel() for param in params) ** -0.5
    for param in params:
        param.grad = torch.zeros_like(param)
        param.grad.to_local().normal_(std=rms)
    return params


def measure_on_rank(rank: int, ranks: int, start: str, shapes: Sequence[Shape], repeats: int, answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(start, ranks)
    timeout = timedelta(seconds=START_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    params = sharded_parameters(shapes)
    steps = [build(params) for build in CONTENDERS.values()]

    def on_round() -> None:
        if rank == 0:
            answers.put(None)

    times = torch.tensor(interleaved_times(steps, repeats, on_round, before=dist.barrier), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if rank == 0:
        answers.put(times.tolist())
    dist.destroy_process_group()


def times_of(
    ranks: int, shapes: Sequence[Shape], repeats: int, on_round: Callable[[], object]
) -> Mapping[str, list[float]]:
    """Returns the seconds of each contender in each round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "swd_fused"])
    with tempfile.TemporaryDirectory() as directory:
        answers: Any = context.Queue()
        arguments = ranks, str(Path(directory) / "start"), shapes, repeats, answers
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
    return dict(zip(CONTENDERS, answer, strict=True))


def case_of(suite: str, ranks: int, repeats: int) -> Case:
    def added(contender: str, times: Mapping[str, list[float]]) -> Row:
        # Both of a round ran within moments of each other, so their difference is steadier than either.
        peers = times[PEERS.get(contender, PEER)]
        difference = Quartiles.of([own - other for own, other in zip(times[contender], peers, strict=True)])
        row = {"added_s": difference.median, "added_q1_s": difference.q1, "added_q3_s": difference.q3}
        # The ranks are other processes too, so what they used cannot be told from what others did.
        return {**row, "load_average": os.getloadavg()[0], "threads": 1, "other_load": None}

    shapes = SUITES[suite].shapes
    columns = {"ranks": ranks, "suite": suite, "elements": SUITES[suite].elements, "tensors": len(shapes)}
    columns["dtype"] = "float32"
    times = partial(times_of, ranks, shapes, repeats)
    return Case(f"{suite} on {ranks} ranks", columns, dict, repeats, PEERS, more=added, times=times)


def tables(rows: Sequence[Row]) -> list[Table]:
    result = []
    for own in grouped(rows, "suite", "ranks"):
        first, cells = own[0], []
        for row in own:
            added, low, high = (f"{1e3 * row[key]:+.1f}" for key in ("added_s", "added_q1_s", "added_q3_s"))
            cells.append(
                [row["contender"], f"{1e3 * row['median_s']:.1f}", f"{row['ratio']:.2f}", added, f"{low} - {high}"]
            )
        title = (
            f"{first['suite']} on {first['ranks']} ranks: {first['elements']:,} elements in {first['tensors']:,} "
            f"tensors, {first['repeats']} repeats, load average {first['load_average']:.1f} on {first['cores']} cores"
        )
        result.append(table(title, ["contender", "median ms", "ratio", "added ms", "quartiles ms"], cells))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("sharded_step", __doc__, repeats=40, threads=None)
    parser.add_argument("--ranks", action="append", type=positive, help="repeatable; default: 2 and 4")
    parser.add_argument(
        "--suite", action="append", choices=list(SUITES), help=f"repeatable; default: {' '.join(DEFAULT_SUITES)}"
    )
    options = parser.parse_args(arguments)
    cases = [
        case_of(suite, ranks, options.repeats)
        for suite in options.suite or DEFAULT_SUITES
        for ranks in options.ranks or (2, 4)
    ]
    carry_out("sharded_step", cases, options.out, tables, plot_sharded_step)


if __name__ == "__main__":
    main()
