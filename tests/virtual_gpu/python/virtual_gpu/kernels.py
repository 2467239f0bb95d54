"""Serves modules, functions and launches: Triton asks the driver for them, and the driver asks here."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .driver import Launch, launches, register, settings

if TYPE_CHECKING:
    from tests.gpu_code.ptx_emulator import Kernel

# CUresult and CUfunction_attribute
TOO_LARGE_TO_BE_COOPERATIVE, UNKNOWN = 720, 999
MOST_THREADS, SHARED_BYTES, LOCAL_BYTES, REGISTERS = 0, 1, 3, 4


@dataclass(frozen=True)
class Module:
    name: str
    ptx: str
    registers: int
    shared: int
    local: int  # spilled, or indexed

    def resident(self, threads: int, shared: int) -> int:
        """Returns how many programs fit on a multiprocessor of an H100."""
        registers = -(-self.registers // 8) * 8 * threads
        return min(32, 2048 // threads, 65536 // registers, 233472 // (shared + self.shared + 1024))

    @functools.cached_property
    def kernel(self) -> Kernel:
        from .emulator import Kernel

        return Kernel(self.ptx)


_modules: list[Module] = []  # a handle is an index and 1, since 0 is none; a function has its module's number


def load(image: int) -> int:
    """Loads a module. The driver gets only a cubin; Triton's cache has the PTX beside it."""
    import triton

    try:
        cubin = ctypes.string_at(image, _elf_size(image))
        for path in Path(triton.knobs.cache.dir).glob("*/*.cubin"):
            if path.read_bytes().startswith(cubin):
                _modules.append(_read(path, Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"))
                return len(_modules)
        print(f"[virtual GPU] a cubin is not in {triton.knobs.cache.dir}: its PTX is unknown", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 0


def _elf_size(image: int) -> int:
    header = ctypes.string_at(image, 64)

    def number(start: int, end: int) -> int:
        return int.from_bytes(header[start:end], "little")

    segments = number(32, 40) + number(54, 56) * number(56, 58)
    sections = number(40, 48) + number(58, 60) * number(60, 62)
    return max(segments, sections)


def _read(cubin: Path, cuobjdump: Path) -> Module:
    usage = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, shared, local = (int(text) for text in found.groups()[1:])
    return Module(found[1], cubin.with_suffix(".ptx").read_text(), registers, shared, local + stack)


def function(module: int, name: bytes) -> int:
    return module if _modules[module - 1].name == name.decode() else 0


def attribute(function: int, attribute: int) -> int:
    module = _modules[function - 1]
    known = {MOST_THREADS: 1024, SHARED_BYTES: module.shared, LOCAL_BYTES: module.local, REGISTERS: module.registers}
    return known.get(attribute, 0)


def launch(function: int, dims: ctypes.Array, shared: int, cooperative: int, stream: int, params: ctypes.Array) -> int:
    """Returns the number of the closure to run, or an error below zero. Reads arguments now, memory when it runs."""
    try:
        return _launch(_modules[function - 1], list(dims[:6]), shared, bool(cooperative), stream, params)
    except BaseException:
        traceback.print_exc()
        return -UNKNOWN


def _launch(module: Module, dims: list[int], shared: int, cooperative: bool, stream: int, params: ctypes.Array) -> int:
    programs, *others, threads = dims[:4]
    if others != [1, 1] or dims[4:] != [1, 1]:
        raise NotImplementedError(f"a grid and block of {dims}: the emulator knows one dimension")
    parameters = module.kernel.code.parameters
    block = np.zeros(max((p.offset + p.size for p in parameters), default=0), np.uint8)
    for i, p in enumerate(parameters):
        block[p.offset : p.offset + p.size] = np.frombuffer(ctypes.string_at(params[i], p.size), np.uint8)
    device = torch.cuda.current_device()
    resident = module.resident(threads, shared)
    launch = Launch(
        module.name,
        programs,
        threads,
        shared,
        cooperative,
        stream,
        device,
        module.registers,
        resident,
        torch.cuda.is_current_stream_capturing(),
    )
    launches.append(launch)
    if cooperative and programs > resident * settings.multiprocessors:
        return -TOO_LARGE_TO_BE_COOPERATIVE

    def run() -> None:
        from . import emulator

        start = time.perf_counter()
        emulator.run(module.kernel, device, block, programs, threads, shared)
        launch.seconds = time.perf_counter() - start

    return register(run)
