"""Runs Triton's PTX in the project's emulator on the memory of a device. Imported at the first launch."""

from __future__ import annotations

import numpy as np

from .driver import settings
from .memory import allocations

try:
    from tests.gpu_code.ptx_emulator import Kernel, Memory
    from tests.gpu_code.ptx_memory import Span
    from tests.gpu_code.ptx_scheduler import Scheduler
    from tests.gpu_code.ptx_state import State
except ImportError as error:
    raise ImportError("The project's PTX emulator, tests/gpu_code, is not on the path: start from its root.") from error

MOST_INSTRUCTIONS = 10**9


def run(kernel: Kernel, device: int, params: np.ndarray, programs: int, threads: int, shared: int) -> None:
    """A kernel may touch what the driver has given out, and nothing else."""
    memory = Memory(Span(start, end - start) for start, end in zip(*allocations(device), strict=True))
    state = State(kernel.code, memory, params, programs, threads, shared)
    with np.errstate(all="ignore"):
        Scheduler(kernel.steps, state, threads, settings.seed, MOST_INSTRUCTIONS).run()
