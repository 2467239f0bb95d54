"""Counts what the host does in a step as training takes it, with new gradients and a learning-rate scheduler: Python
calls of the package, and the files they are in.

The sharded step is of DTensors on two ranks, of which one exists: torch's fake process group answers for the other.
Launches of the Triton backend are left out, as in benchmarks.host_work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.host_work import without_launches
from swd_fused import FusedAdamS

PACKAGE = str(Path(sys.modules["swd_fused"].__file__ or "").parent)
STEPS_BEFORE = 3
SHARDED = "FSDP2, lagged"
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lagged": {"schedule": "lagged"},
    "clipping": {"max_grad_norm": 1.0},
    "torch backend": {"backend": "torch"},
    "triton backend": {"backend": "triton"},
    SHARDED: {"schedule": "lagged"},
}


@cache
def two_ranks() -> DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return init_device_mesh("cpu", (2,))


def sharded(values: Tensor) -> Tensor:
    return DTensor.from_local(values, two_ranks(), [Shard(0)])


def files_of_calls(options: dict[str, Any], made: Callable[[Tensor], Tensor]) -> list[str]:
    """Returns the file of each Python call of the package in one step, in their order."""
    files: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    param = nn.Parameter(made(torch.ones(10)))
    optimizer = FusedAdamS([param], **options)
    scheduler = CosineAnnealingLR(optimizer, 1000)
    for step in range(STEPS_BEFORE + 1):
        param.grad = made(torch.ones(10))
        sys.setprofile(trace if step == STEPS_BEFORE else None)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        scheduler.step()
    return files


def main() -> None:
    for name, options in OPTIONS.items():
        on_triton = options.get("backend") == "triton"
        if on_triton and os.environ.get("TRITON_INTERPRET") == "1":
            continue  # interpreted kernels would be counted too
        with without_launches() if on_triton else nullcontext():
            files = files_of_calls(options, sharded if name == SHARDED else lambda values: values)
        print(f"{name}: {len(files)} calls in {len(set(files))} files")


if __name__ == "__main__":
    main()
