"""Steps of FusedAdamS whose launches run in the PTX emulator: the host's code as it is, on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from swd_fused import backends
from swd_fused.backends.triton import plan as triton_plan
from swd_fused.backends.triton.launch import ARGUMENTS, Variant
from swd_fused.core.bucket import Bucket

from .offline_compiler import Configuration, submit
from .ptx_emulator import Kernel, Memory, Statistics
from .ptx_memory import READABLE, WRITABLE, Span

WRITTEN = {"results", "totals", "last", "sums", "slots", "steps", "counter"}


class Emulator:
    """`statistics` has what each launch took, with the kernel's name."""

    def __init__(self, programs: int, arch: int, seed: int | None, find_races: bool) -> None:
        self.programs, self.arch = programs, arch
        self.options = {"seed": seed, "find_races": find_races, "most_instructions": 10**8}
        self.statistics: list[tuple[str, Statistics]] = []
        self.operands: list[Span] = []  # of the bucket that a kernel is launched for

    def launcher_for(self, kernel: Any, device: torch.device, variant: Variant, sum_grads: bool = False) -> Launcher:
        has_choice = "SUM_GRADS" in kernel.arg_names
        return Launcher(self, kernel, Configuration(variant, sum_grads or not has_choice))

    def note_operands(self, bucket: Bucket) -> None:
        """A tensor that takes part as a copy may be touched too, since nobody knows here which one it is."""
        self.operands = [
            *(span_of(grad, READABLE) for grad in bucket.grads if grad is not None),
            *(
                span_of(tensor, READABLE | WRITABLE)
                for tensors in [*triton_plan.columns_of(bucket), bucket.plan.copies]
                for tensor in tensors
            ),
        ]


class Launcher:
    def __init__(self, emulator: Emulator, kernel: Any, configuration: Configuration) -> None:
        self.emulator, self.name, self.configuration = emulator, kernel.__name__, configuration
        self.arguments = [name for name in kernel.arg_names if name in ARGUMENTS]

    def __call__(self, programs: int, *args: Tensor | int) -> None:
        emulator = self.emulator
        binary = submit(self.name, emulator.arch, self.configuration).result()
        spans, values = list(emulator.operands), []
        for name, arg in zip(self.arguments, args, strict=True):
            if isinstance(arg, Tensor):
                spans.append(span_of(arg, READABLE | (WRITABLE if name in WRITTEN else 0)))
            values.append(arg.data_ptr() if isinstance(arg, Tensor) else arg)
        code = emulated(self.name, emulator.arch, self.configuration)
        statistics = code.run(Memory(spans), values, programs, binary.threads, binary.shared_bytes, **emulator.options)
        emulator.statistics.append((self.name, statistics))


def span_of(tensor: Tensor, rights: int) -> Span:
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size(), rights)


@functools.cache
def emulated(kernel: str, arch: int, configuration: Configuration) -> Kernel:
    return Kernel(submit(kernel, arch, configuration).result().ptx)


@contextmanager
def emulated_launches(
    programs: int = 5, arch: int = 90, seed: int | None = None, find_races: bool = False
) -> Iterator[Emulator]:
    """Within, backend="triton" serves CPU tensors, as a device that holds so many programs would."""
    emulator = Emulator(programs, arch, seed, find_races)
    triton, launch = backends.load_triton_backend(), triton_plan.Plan.launch

    def launch_noted(self: triton_plan.Plan, kernel: Any, bucket: Bucket, *args: Any, **options: Any) -> None:
        emulator.note_operands(bucket)
        launch(self, kernel, bucket, *args, **options)

    with (
        patch.object(backends, "choose", lambda _, options: triton if options.backend == "triton" else backends.TORCH),
        patch.object(triton_plan, "programs_on", lambda *_: programs),
        patch.object(triton_plan, "launcher_for", emulator.launcher_for),
        patch.object(triton_plan.Plan, "launch", launch_noted),
    ):
        yield emulator
