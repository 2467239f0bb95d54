"""Compiling and launching the Triton kernels: once for each device and combination of dtypes, then at little cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from swd_fused.backends.triton.kernels import memory

# Tensors are cut at multiples of BLOCK elements: one 128-bit access for each of 128 threads and float32 operand. Twice
# as many took 96 registers and more. No autotuning: trial runs of an update would apply it again.
THREADS: int = memory.THREADS.value
BLOCK = 512

# 1024 threads, each with 64 bytes of an update on their way, are 64 KB for a multiprocessor. An H100 needs 18 KB in
# flight to reach its bandwidth (3.35 TB/s at some 700 ns), a B200 43 KB. More programs would only make sums longer.
PROGRAMS_PER_MULTIPROCESSOR = 8

# So many programs are resident with 64 registers for each thread, as the plain float32 step has them. Other variants
# need more, and get it.
PLAIN_REGISTERS = 64

# Where another version of the compiler spills some of them even so, as Triton 3.9 does.
MORE_REGISTERS = (80, 96, 128, 168)

# In the interpreter there is no device to ask. Programs run one after another there, so a launch in which they wait for
# one another must have one only.
INTERPRETED_PROGRAMS = 1

INTERPRETED: bool = triton.knobs.runtime.interpret


class Launcher:
    """A kernel with its compile-time constants on one device."""

    def __init__(
        self, kernel: Any, device: torch.device, constants: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self._kernel = kernel
        self._device = device
        self._constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self._options = options
        self._compiled: Any = None

    def compiled(self, *args: Tensor | torch.dtype | int) -> Any:
        """Compiles for arguments of these dtypes; nothing is specialised to their values."""
        if self._compiled is None:
            with torch.cuda.device(self._device):
                self._compiled = self._compile(args, self._options)
                for most in MORE_REGISTERS:
                    if self._compiled.n_spills and most > self._options.get("maxnreg", math.inf):
                        self._compiled = self._compile(args, {**self._options, "maxnreg": most})
        return self._compiled

    def _compile(self, args: Sequence[Tensor | torch.dtype | int], options: Mapping[str, Any]) -> Any:
        compiled = self._kernel.warmup(*args, grid=(1,), **self._constants, **options)
        compiled[1, 1, 1]  # loads it, so that its registers are known
        return compiled

    def __call__(self, programs: int, *args: Tensor | int) -> None:
        if INTERPRETED:
            self._kernel[programs,](*args, **self._constants)
            return
        compiled = self.compiled(*args)
        stream = torch.cuda.current_stream(self._device)
        # Triton's own call binds and specialises all arguments anew: 13 us against 3 on this path. It takes addresses
        # as they are, where for tensors it would ask the driver about each.
        values = []
        for arg in args:
            if isinstance(arg, Tensor):
                arg.record_stream(stream)  # or, freed on the stream that made it, it could be reused too early
                arg = arg.data_ptr()
            values.append(arg)
        with nullcontext() if torch.cuda.current_device() == self._device.index else torch.cuda.device(self._device):
            compiled[programs, 1, 1](*values, *self._constants.values(), stream=stream.cuda_stream)


def resident_programs(compiled: Any, device: torch.device) -> int:
    """How many programs of a compiled kernel a device holds at once, so that a cooperative launch cannot fail."""
    properties: Any = torch.cuda.get_device_properties(device)
    registers = -(-compiled.n_regs // 8) * 8 * THREADS  # given out in units of 8 for each thread
    limits: tuple[int, ...] = (
        PROGRAMS_PER_MULTIPROCESSOR,
        properties.max_threads_per_multi_processor // THREADS,
        properties.regs_per_multiprocessor // registers,
    )
    multiprocessors: int = properties.multi_processor_count
    return max(1, min(limits)) * multiprocessors


@cache
def can_launch_cooperatively(device: torch.device) -> bool:
    """All CUDA devices that Triton serves can. Of AMD's the driver tells; an old Triton (3.6) does not ask it."""
    if torch.version.hip is None:
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return bool(properties.get("cooperativeLaunch", 1))
