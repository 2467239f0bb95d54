"""Runs Triton's PTX in the project's emulator on the memory of a device. Imported at the first launch."""

from __future__ import annotations

import numpy as np

from . import memory
from .driver import settings

try:
    from tests.gpu_code.ptx_emulator import Kernel, Memory
    from tests.gpu_code.ptx_scheduler import Scheduler
    from tests.gpu_code.ptx_state import State
    from tests.gpu_code.ptx_types import UNSIGNED
except ImportError as error:
    raise ImportError("The project's PTX emulator, tests/gpu_code, is not on the path: start from its root.") from error

MOST_INSTRUCTIONS = 10**9


class DeviceMemory(Memory):
    """A device's memory at its real addresses. Only what the driver has given out may be touched."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.base = memory.BASES[device]
        self.size = memory.SIZE
        self.bytes = memory.BYTES[device]
        self.by_width = {width: self.bytes.view(dtype) for width, dtype in UNSIGNED.items()}
        self.starts, self.ends = memory.allocations(device)

    def load(self, address: np.ndarray, width: int, element: int) -> np.ndarray:
        return self.by_width[width][(address - self.base) // (width // 8) + element]

    def store(self, address: np.ndarray, width: int, element: int, bits: np.ndarray) -> None:
        self.by_width[width][(address - self.base) // (width // 8) + element] = bits

    def check(self, address: np.ndarray, size: int, right: int) -> np.ndarray | None:
        if not self.starts.size:
            return np.ones(address.shape, bool)
        last = np.searchsorted(self.starts, address, side="right") - 1
        bad = (last < 0) | (address + size > self.ends[np.maximum(last, 0)])
        return bad if bad.any() else None


def run(kernel: Kernel, device: int, params: np.ndarray, programs: int, threads: int, shared: int) -> None:
    state = State(kernel.code, DeviceMemory(device), params, programs, threads, shared)
    with np.errstate(all="ignore"):
        Scheduler(kernel.steps, state, threads, settings.seed, MOST_INSTRUCTIONS).run()
