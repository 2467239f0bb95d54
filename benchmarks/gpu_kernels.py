"""The Triton kernels as compiled for a GPU: registers, spills, resident programs, seconds. Launches none of them."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_modes import MODES, Mode
from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.launch import Dtypes, Variant, launcher_for, resident_programs

# Of steps that need several launches: two dtypes or devices, gradients that are released.
SEVERAL_LAUNCHES = ("stored_sums_kernel", "gradient_sums_kernel", "update_kernel", "last_exp_avg_sq_sum_kernel")


class Compiled(NamedTuple):
    kernel: str
    mode: str
    registers: int
    spills: int
    programs: int  # on each multiprocessor
    is_cooperative: bool
    seconds: float  # until it is compiled, or found in Triton's cache, and loaded


def compiled_kernels() -> Iterator[Compiled]:
    """Compiles the kernels of all modes for the current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for name, mode in kernels_of_modes():
        dtypes, variant = built_for(mode)
        start = perf_counter()
        binary = launcher_for(getattr(kernels, name), device, dtypes, variant, sum_grads=True).compiled()
        seconds = perf_counter() - start
        programs = resident_programs(binary, device) // multiprocessors
        is_cooperative = bool(binary.metadata.launch_cooperative_grid)
        yield Compiled(name, mode.name, binary.n_regs, binary.n_spills, programs, is_cooperative, seconds)


def kernels_of_modes() -> list[tuple[str, Mode]]:
    """Returns the kernels by name, each with the first mode that needs it compiled so."""
    first: dict[Any, tuple[str, Mode]] = {}
    for mode in MODES:
        step = "lagged_step_kernel" if mode.options.get("schedule") == "lagged" else "exact_step_kernel"
        names = [step, *(SEVERAL_LAUNCHES if mode.other_dtype else ())]
        for name in names:
            first.setdefault((name, built_for(mode)), (name, mode))
    return list(first.values())


def built_for(mode: Mode) -> tuple[Dtypes, Variant]:
    """Returns what the kernels of a mode are compiled for. Masters of bfloat16 are remainders of 16 bits."""
    has_masters = bool(mode.options.get("master_weights"))
    weight = torch.int16 if has_masters else mode.dtype
    variant = Variant(
        amsgrad=bool(mode.options.get("amsgrad")),
        master=has_masters,
        stochastic=bool(mode.options.get("stochastic_rounding")),
        coded=mode.options.get("state_dtype") == "8bit",
    )
    return Dtypes(mode.dtype, mode.dtype, *[torch.float32] * 3, weight), variant
