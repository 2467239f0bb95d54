"""Counts what the host does in a step as training takes it, with new gradients and a learning-rate scheduler: Python
calls of the package, the files they are in, and switches between files.

The sharded step is of DTensors on two ranks, of which one exists: torch's fake process group answers for the other.
Launches of the Triton backend are left out, as in benchmarks.host_work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.conditions import positive
from benchmarks.host_work import without_launches
from swd_fused import FusedAdamS

PACKAGE = str(Path(sys.modules["swd_fused"].__file__ or "").parent)
STEPS_BEFORE = 3


def plain(values: Tensor) -> Tensor:
    return values


@cache
def two_ranks() -> DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return init_device_mesh("cpu", (2,))


def sharded(values: Tensor) -> Tensor:
    return DTensor.from_local(values, two_ranks(), [Shard(0)])


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    made: Callable[[Tensor], Tensor] = plain
    context: Callable[[], AbstractContextManager[None]] = nullcontext


CASES = (
    Case("exact"),
    Case("lagged", {"schedule": "lagged"}),
    Case("clipping", {"max_grad_norm": 1.0}),
    Case("torch backend", {"backend": "torch"}),
    Case("triton backend", {"backend": "triton"}, context=without_launches),
    Case("FSDP2, lagged", {"schedule": "lagged"}, sharded),
)


def calls_of(case: Case, tensors: int) -> tuple[Counter[str], int]:
    """Returns the package's Python calls of one step by file, and how often control went from one file to another."""
    files: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    with case.context():
        params = [nn.Parameter(case.made(torch.ones(10))) for _ in range(tensors)]
        optimizer = FusedAdamS(params, **case.options)
        scheduler = CosineAnnealingLR(optimizer, 1000)
        for step in range(STEPS_BEFORE + 1):
            for param in params:
                param.grad = case.made(torch.ones(10))
            sys.setprofile(trace if step == STEPS_BEFORE else None)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
            scheduler.step()
    return Counter(files), sum(before != after for before, after in pairwise(files))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_calls", description=__doc__)
    parser.add_argument(
        "--tensors", type=positive, default=1, help="of the model, 10 elements each; default: %(default)s"
    )
    args = parser.parse_args()
    for case in CASES:
        if "triton" in case.name and os.environ.get("TRITON_INTERPRET") == "1":
            continue  # interpreted kernels would be counted too
        calls, switches = calls_of(case, args.tensors)
        print(f"{case.name}: {calls.total()} calls in {len(calls)} files, {switches} switches between files")


if __name__ == "__main__":
    main()
