"""Compiles and launches the Triton kernels: constants, options, registers and grids by combination of dtypes."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from swd_fused.backends.triton.kernels import kernels, tables
from swd_fused.user_warning import warn_user

# Tensors are cut at multiples of BLOCK elements: one 128-bit access of each float32 operand for each of 128 threads.
# Nothing is autotuned: trial runs would apply the update again.
THREADS: int = tables.THREADS.value
ALIGNMENT: int = tables.ALIGNMENT.value
BLOCK = 512

# To reach its bandwidth an H100 needs 18 KB in flight to each multiprocessor (3.35 TB/s at some 700 ns), a B200 42 KB
# (8 TB/s at 800 ns). An update loads 96 to 160 bytes for each thread, so 3 or 4 programs are enough. More than 8 would
# only make the final sums longer.
PROGRAMS_PER_MULTIPROCESSOR = 8

# Each of a multiprocessor's four parts has 512 registers for each lane of a warp: 65,536 on NVIDIA's devices, and
# 131,072 on AMD's MI200, MI300 and MI350, of which torch may report half. They are allocated in units of 8.
PARTS, REGISTERS_OF_LANE, REGISTERS_UNIT = 4, 512, 8

# How many loads of each operand an update issues at once. An update waits for all its loads. With one load of 128 bits,
# and the registers that it takes, 5 programs on a multiprocessor had 30 to 40 KB in flight; a B200 needs 42.
LOADS_IN_FLIGHT = 2

# Limits of registers to try in turn if a kernel spills more than a few at its own limit. A few spills are scalars of a
# segment, which no loop over elements touches; with more registers fewer programs would be resident.
MORE_REGISTERS = (168, 255)
FEW_SPILLS = 20

# The number of programs in the interpreter, which has no device. It runs programs one after another, so a launch whose
# programs wait for one another can have only one.
INTERPRETED_PROGRAMS = 1

INTERPRETED: bool = triton.knobs.runtime.interpret

# The kernels' arguments: dtypes by name, for compiling before any tensor exists. A 0 stands for a number.
ARGUMENTS: dict[str, torch.dtype | int] = {
    **dict.fromkeys(("results", "totals", "last", "sums", "slots", "hyper", "limits"), torch.float64),
    **dict.fromkeys(("exp_avg_sq_mean", "grad_factor", "skip"), torch.float64),
    **dict.fromkeys(("steps", "grad_scale", "found_inf"), torch.float32),
    **dict.fromkeys(("tensors", "grads", "segments"), torch.int64),
    **dict.fromkeys(("counter", "program_segments"), torch.int32),
    **dict.fromkeys(("n_tensors", "n_segments"), 0),
}


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
        self.arguments = [name for name in kernel.arg_names if name in ARGUMENTS]

    def compiled(self) -> Any:
        """Returns the kernel, compiled at the first call for the arguments' dtypes but for no particular values."""
        if self._compiled is None:
            args = list(map(ARGUMENTS.__getitem__, self.arguments))
            with torch.cuda.device(self._device):
                for options in options_in_turn(self._options):
                    self._compiled = self._kernel.warmup(*args, grid=(1,), **self._constants, **options)
                    self._compiled[1, 1, 1]  # loads the kernel, so that its registers are known
                    if self._compiled.n_spills <= FEW_SPILLS:
                        break
        return self._compiled

    def __call__(self, programs: int, *args: Tensor | int) -> None:
        if INTERPRETED:
            self._kernel[programs,](*args, **self._constants)
            return
        compiled = self.compiled()
        stream = torch.cuda.current_stream(self._device)
        # Triton's own call binds and specialises all arguments anew: 13 us against 3 on this path. Addresses are passed
        # instead of tensors, since Triton would ask the driver about each tensor.
        values = []
        for arg in args:
            if isinstance(arg, Tensor):
                arg.record_stream(stream)  # else memory freed on its own stream could be reused too early
                arg = arg.data_ptr()
            values.append(arg)
        with nullcontext() if torch.cuda.current_device() == self._device.index else torch.cuda.device(self._device):
            compiled[programs, 1, 1](*values, *self._constants.values(), stream=stream.cuda_stream)


# --- Variants of kernels, and their compilation


class Variant(NamedTuple):
    """Names the properties for which kernels are compiled: dtypes first, then features."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    averaged: torch.dtype  # of max_exp_avg_sq with amsgrad, else of exp_avg_sq
    weight: torch.dtype  # of masters, of their remainders (int16), or of the parameters if there are no masters
    amsgrad: bool = False
    master: bool = False
    stochastic: bool = False
    adds_l2: bool = False
    coded: bool = False  # whether any tensor's moments are kept in 8 bits
    cautious: bool = False  # whether any group decays cautiously
    averages: bool = False  # whether weights are averaged


DTYPES = 6  # the number of dtypes, which come first


@cache
def launcher_for(kernel: Any, device: torch.device, variant: Variant, sum_grads: bool = False) -> Launcher:
    # On the CPU nothing is compiled: kernels are interpreted, or a benchmark leaves launches out.
    warp_size = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
    options = compile_options(kernel, variant, torch.version.hip is not None, warp_size)
    return Launcher(kernel, device, constants_for(variant, sum_grads), options)


# A variant as kernels see it: Triton's dtypes, and how many elements an access, a block, and a shorter block of single
# accesses have. The masks and addresses of single accesses take many registers.
Config = cast(Any, namedtuple("Config", [*Variant._fields, "compute", "vector", "block", "tail"]))


def constants_for(variant: Variant, sum_grads: bool) -> dict[str, Any]:
    """Returns the kernels' compile-time constants by name."""
    dtypes: list[Any] = [*variant[:DTYPES], torch.promote_types(variant.averaged, torch.float32)]
    # How many elements of the widest operand 128 bits hold. Narrower operands are loaded in 64 or 32 bits, but each
    # access of a warp is one stretch of memory. Loading 128 bits of each would leave gaps in accesses of the widest.
    vector = ALIGNMENT // max(dtype.itemsize for dtype in dtypes[:-1])
    vectors = THREADS * vector
    # Beside tensors with codes those without are few and small, and must not determine how many registers are used.
    sizes = vector, vectors if variant.coded else LOADS_IN_FLIGHT * vectors, vectors // 2
    *names, compute = (getattr(tl, str(dtype).removeprefix("torch.")) for dtype in dtypes)
    config = Config(*names, *variant[DTYPES:], compute, *sizes)
    return {"CONFIG": config, "SUM_GRADS": sum_grads}


def compile_options(kernel: Any, variant: Variant, hip: bool, warp_size: int) -> dict[str, Any]:
    # Fusion is set explicitly, since Triton intends to change its default.
    options: dict[str, Any] = {"num_warps": THREADS // warp_size, "enable_fp_fusion": True}
    if kernel is kernels.exact_step_kernel:
        options["launch_cooperative_grid"] = True
    if not hip:
        # Few enough that enough programs are resident: 5 with 96, 4 with 128. Without a limit NVIDIA's compiler uses up
        # to 255 for some kernels. Found by compiling for sm_80, sm_90, sm_100 and sm_120. On sm_120 some kernels for
        # 16-bit weights and 8-bit moments spill in their loops, as do float64's on sm_100: `Launcher` gives them more.
        has_16_bits = variant.weight.itemsize == variant.exp_avg.itemsize == 2
        options["maxnreg"] = 96 if kernel is kernels.exact_step_kernel and has_16_bits else 128
    return options


def options_in_turn(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the options to try until few registers are spilled. AMD's compiler is given no limit of registers."""
    return [options, *({**options, "maxnreg": most} for most in MORE_REGISTERS if "maxnreg" in options)]


@cache
def programs_on(kernel: Any, device: torch.device, variant: Variant) -> int:
    """Returns how many programs of the kernel the device holds at once."""
    if INTERPRETED:
        return INTERPRETED_PROGRAMS
    return resident_programs(launcher_for(kernel, device, variant, sum_grads=True).compiled(), device)


def resident_programs(compiled: Any, device: torch.device) -> int:
    """Returns how many programs of a compiled kernel a device holds at once. A larger grid would run in waves, the last
    of them half empty, and could not be launched cooperatively."""
    properties: Any = torch.cuda.get_device_properties(device)
    registers = max(1, -(-compiled.n_regs // REGISTERS_UNIT)) * REGISTERS_UNIT
    limits: tuple[int, ...] = (
        PROGRAMS_PER_MULTIPROCESSOR,
        properties.max_threads_per_multi_processor // THREADS,
        PARTS * (REGISTERS_OF_LANE // registers) * properties.warp_size // THREADS,
    )
    return max(1, min(limits)) * int(properties.multi_processor_count)


# --- The capabilities of devices

_can_wait: dict[torch.device, bool] = {}


def can_wait(device: torch.device) -> bool:
    """Returns whether the programs of a grid can wait for one another, which needs a cooperative launch.

    All CUDA devices that Triton supports can do that. For AMD's the driver knows, but an old Triton (3.6) does not ask
    it. The interpreter runs one program after another.
    """
    if INTERPRETED:
        return INTERPRETED_PROGRAMS == 1
    if device not in _can_wait:
        utils = triton.runtime.driver.active.utils if torch.version.hip is not None else None
        _can_wait[device] = utils is None or bool(utils.get_device_properties(device.index).get("cooperativeLaunch", 1))
    return _can_wait[device]


def refuses_cooperation(error: RuntimeError, device: torch.device) -> bool:
    """Returns whether a launch failed because its grid was refused, so that nothing has run. Remembers this, and warns.
    Under MPS and in green contexts a device has fewer multiprocessors than its properties say."""
    # "Triton Error [CUDA]: too many blocks in cooperative launch", "Triton Error [HIP]: Code: 720, Messsage: ...".
    if not re.search(r"cooperative launch|Code: 720\b", str(error)):
        return False
    _can_wait[device] = False
    warn_user(
        f"{device} refused a cooperative launch of one program for each place that it should have: it seems to have "
        "fewer multiprocessors than its properties say, as under MPS or in a green context. FusedAdamS goes on with "
        "two launches for each step.",
    )
    return True


@cache
def why_not_launchable(device: torch.device) -> str | None:
    """Returns why Triton cannot launch anything on this device, or None if it can load a small kernel. Triton compiles
    a part of its launcher in C at first use, so it cannot launch without a C compiler."""
    if INTERPRETED:
        return None
    try:
        Launcher(kernels.last_exp_avg_sq_sum_kernel, device, {}, {}).compiled()
    except Exception as error:  # of any kind: a compiler may be missing, fail, or be too old for the device
        return f"Triton cannot launch kernels here ({type(error).__name__}: {error})"
    return None
