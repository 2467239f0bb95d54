"""Loads the simulated driver in place of NVIDIA's, puts closures on its streams, and reads its counters."""

from __future__ import annotations

import ctypes
import itertools
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(os.environ["VIRTUAL_GPU_DRIVER"])
# torch finds a library of this name loaded, and looks no further.
library = ctypes.CDLL(str(_FOLDER / "libcudart.so.13"), mode=ctypes.RTLD_GLOBAL)
_libcuda = ctypes.CDLL(str(_FOLDER / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)

library.vgpu_memory.restype = ctypes.c_void_p
library.vgpu_memory_size.restype = ctypes.c_long
library.vgpu_pending.restype = ctypes.c_long
library.vgpu_push.argtypes = [ctypes.c_void_p, ctypes.c_long]


@dataclass
class Settings:
    """`multiprocessors` limits cooperative grids: fewer than the driver reports make a device that is shared, as with
    MPS and green contexts. `seed` shuffles the warps in the emulator; None runs them in lock-step.
    """

    devices: int
    multiprocessors: int
    seed: int | None = None


settings = Settings(int(os.environ.get("VIRTUAL_GPU_DEVICES", "1")), int(os.environ.get("VIRTUAL_GPU_SMS", "2")))


@dataclass
class Launch:
    """Describes a launch of a Triton kernel, whether or not it has run yet."""

    name: str
    grid: int
    threads: int
    shared: int
    cooperative: bool
    stream: int
    device: int
    registers: int
    resident: int  # programs that fit on one multiprocessor
    captured: bool
    seconds: float | None = None  # that the emulator took; of the last run, if there were several


launches: list[Launch] = []
errors: list[BaseException] = []  # of what ran on a stream

# In the order of machine.h.
_COUNTERS = (
    *("sync", "event_query", "host_alloc", "malloc", "h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable"),
    *("d2d", "launches", "refused_in_capture", "wrong_device"),
)
_counters = (ctypes.c_long * 16).in_dll(library, "vgpu_counts")


def counts() -> dict[str, int]:
    """Returns how often each kind of call reached the driver; `sync` counts each time the host waited."""
    return dict(zip(_COUNTERS, _counters, strict=False))


def pending() -> int:
    """Returns the number of operations on streams that have not run yet."""
    return library.vgpu_pending()


def run_all() -> None:
    library.vgpu_run_all()


def run_late(yes: bool) -> None:
    """Chooses between running each operation at its call (False) and as late as possible."""
    library.vgpu_run_late(int(yes))


def forget_errors() -> None:
    errors.clear()
    library.vgpu_forget_failure()


# --- Closures on streams

_closures: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


def register(closure: Callable[[], None]) -> int:
    number = next(_numbers)
    _closures[number] = closure
    return number


def push(stream: int, closure: Callable[[], None]) -> None:
    """Queues a closure on a stream. If the stream is being captured, it runs in each replay."""
    library.vgpu_push(stream, register(closure))


def _run(number: int, again: int) -> int:
    import torch

    closure = _closures[number] if again else _closures.pop(number)
    try:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            closure()
    except BaseException as error:
        errors.append(error)
        traceback.print_exc()
        return 1
    return 0


# --- What the driver asks Python for

_ANSWERS = {
    "run": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, ctypes.c_int),
    "launch": ctypes.CFUNCTYPE(
        ctypes.c_long,
        ctypes.c_long,
        ctypes.POINTER(ctypes.c_uint),
        ctypes.c_uint,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "load": ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p),
    "function": ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_char_p),
    "attribute": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, ctypes.c_int),
    "unexpected": ctypes.CFUNCTYPE(None, ctypes.c_char_p),
}


class _Python(ctypes.Structure):
    _fields_ = list(_ANSWERS.items())


def connect(**answers: Callable[..., object]) -> None:
    """Gives the driver the functions `launch`, `load`, `function` and `attribute` of kernels.py to call."""
    answers |= {"run": _run, "unexpected": lambda name: traceback.print_stack()}
    global _connected  # the driver does not keep these alive
    _connected = _Python(**{name: _ANSWERS[name](answer) for name, answer in answers.items()})
    library.vgpu_connect(_connected)
