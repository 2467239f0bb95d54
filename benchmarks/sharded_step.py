"""What clipping and a step of sharded parameters take, under FSDP2 on ranks of this machine (gloo, loopback).

Ranks take one thread each. All contenders take turns; before each step all ranks wait for each other, and the time of
a step is that of the slowest rank. On fewer cores than ranks the operating system's scheduler is part of every number.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import process_time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.conditions import OtherLoad, positive
from benchmarks.step_times import contenders
from benchmarks.step_times.contenders import CLIPPED_PEER, CONTENDERS, PEER, Contender, Params, adamw, fused_adamw
from benchmarks.step_times.harness import Case, Step, Times, carry_out, command, interleaved_times
from benchmarks.step_times.pictures import plot_sharded_step
from benchmarks.step_times.suites import SUITES as ALL_SUITES
from benchmarks.step_times.suites import Shape, Suite

SUITES = {
    "1000x16x16": Suite(((16, 16),) * 1000, repeats=40),
    "200x128x128": Suite(((128, 128),) * 200, repeats=80),
    "48x768x768": Suite(((768, 768),) * 48, repeats=80),
    "gpt2-124m": Suite(ALL_SUITES["gpt2-124m"].shapes, repeats=15),
}
QUICK_SUITES = {"1000x16x16": Suite(((16, 16),) * 10, repeats=2)}


class OnLocalTensors(Contender):
    """A step without DTensors and their dispatch. AdamW does not need them unless it clips."""

    def build(self, params: Params) -> Step:
        locals_ = [nn.Parameter(param.to_local().detach()) for param in params]  # type: ignore[attr-defined]
        for local, param in zip(locals_, params, strict=True):
            local.grad = param.grad.to_local()  # type: ignore[union-attr]
        return super().build(locals_)


class AllReduce(Contender):
    """The bare all-reduce of as many numbers as an exact step sends."""

    def build(self, params: Params) -> Step:
        return partial(dist.all_reduce, torch.zeros(4, dtype=torch.float64))


FOREACH = partial(adamw, foreach=True)
CLIPPED_ADAMW = fused_adamw(max_grad_norm=contenders.MAX_GRAD_NORM, backend="cpu")
COMPARED = (
    CONTENDERS[PEER],
    CONTENDERS["AdamW foreach"],
    OnLocalTensors("AdamW fused, local tensors", "fused", None, PEER, adamw),
    CONTENDERS["FusedAdamS exact (cpu)"],
    CONTENDERS["FusedAdamS lagged (cpu)"],
    Contender("FusedAdamW (cpu)", "cpu", 28, PEER, fused_adamw(backend="cpu")),
    CONTENDERS[CLIPPED_PEER],
    Contender("AdamW foreach + clip_grad_norm_", "foreach", None, CLIPPED_PEER, FOREACH, clips_before=True),
    CONTENDERS["FusedAdamS exact + clip (cpu)"],
    Contender("FusedAdamW + clip (cpu)", "cpu", 32, CLIPPED_PEER, CLIPPED_ADAMW),
    AllReduce(contenders.ALL_REDUCE, "gloo", None, PEER, adamw),
)
BY_NAME = {contender.name: contender for contender in COMPARED}


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


def measure_on_rank(
    rank: int, ranks: int, start: str, shapes: Sequence[Shape], names: Sequence[str], repeats: float
) -> tuple[Times, float]:
    """Returns the seconds of the slowest rank by contender, and those of all processors that the ranks used."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(start, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=2))
    params = sharded_parameters(shapes)
    steps = {name: BY_NAME[name].build(params) for name in names}
    times = interleaved_times(steps, repeats, before=dist.barrier)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    used = torch.tensor(process_time(), dtype=torch.float64)
    dist.all_reduce(used)
    dist.destroy_process_group()
    return dict(zip(steps, slowest.tolist(), strict=True)), float(used)


def times_on_ranks(ranks: int, shapes: Sequence[Shape], case: Case, other_load: OtherLoad) -> Times:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "benchmarks.step_times.pictures"])
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(ranks, context) as pool:
        arguments = ranks, str(Path(directory, "start")), shapes, list(case.contenders), case.repeats
        started = [pool.submit(measure_on_rank, rank, *arguments) for rank in range(ranks)]
        times, seconds = started[0].result()
    other_load.count_as_own(seconds)
    return times


def case_of(name: str, suite: Suite, ranks: int) -> Case:
    times = partial(times_on_ranks, ranks, suite.shapes)
    case = contenders.case_of(f"{name} on {ranks} ranks", suite, COMPARED, times=times)
    return replace(case, columns={"ranks": ranks, **case.columns, "suite": name})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("sharded_step", __doc__)
    parser.add_argument("--ranks", action="append", type=positive, help="repeatable; default: 2")
    options = parser.parse_args(arguments)
    options.threads = 1
    suites = QUICK_SUITES if options.quick else SUITES
    cases = [case_of(name, suite, ranks) for ranks in options.ranks or (2,) for name, suite in suites.items()]
    carry_out(options, cases, plot=plot_sharded_step)


if __name__ == "__main__":
    main()
