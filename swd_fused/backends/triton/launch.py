"""Compiling and launching the Triton kernels: constants, options, registers and grids by combination of dtypes."""

from __future__ import annotations

import ctypes
import math
import re
from collections import namedtuple
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from swd_fused.backends.triton.kernels import kernels, memory
from swd_fused.core.bucket import Bucket
from swd_fused.user_warning import warn_user

# Tensors are cut at multiples of BLOCK elements: one 128-bit access for each of 128 threads and float32 operand. No
# autotuning: trial runs of an update would apply it again.
THREADS: int = memory.THREADS.value
BLOCK = 512
ALIGNMENT = 16  # of the widest access, in bytes

# To reach its bandwidth an H100 needs 18 KB on their way to each multiprocessor (3.35 TB/s at some 700 ns), a B200 42
# (8 TB/s at 800 ns). With 96 to 160 bytes of an update for each thread 3 or 4 programs are enough; more than 8 would
# only make sums longer.
PROGRAMS_PER_MULTIPROCESSOR = 8

# MI200, MI300 and MI350. Each of a multiprocessor's four SIMDs has 512 vector registers for each lane, given out in
# units of 8: together 131,072, of which torch may report 65,536. HIP counts in this way when it allows a cooperative
# launch.
CDNA = ("gfx90a", "gfx942", "gfx950")
SIMDS, REGISTERS_OF_SIMD = 4, 512

# Of each operand, in an update. An update waits for all that it has asked for, so with one load of 128 bits and the
# registers that it takes, 5 programs on a multiprocessor had 30 to 40 KB on their way; a B200 needs 42.
LOADS_IN_FLIGHT = 2

# Tried in turn where a compiler spills more than a few registers at the number chosen for a kernel. A few are scalars
# of a segment, which no loop over elements touches; with more registers fewer programs would be resident.
MORE_REGISTERS = (168, 255)
FEW_SPILLS = 20

# In the interpreter there is no device to ask. Programs run one after another there, so a launch in which they wait for
# one another must have one only.
INTERPRETED_PROGRAMS = 1

INTERPRETED: bool = triton.knobs.runtime.interpret

# What the kernels are passed, by name, for compiling them before any of it exists. A 0 stands for a number.
ARGUMENTS: dict[str, torch.dtype | int] = {
    **dict.fromkeys(("results", "totals", "last", "sums", "slots", "hyper", "limits"), torch.float64),
    **dict.fromkeys(("exp_avg_sq_mean", "grad_factor", "skip"), torch.float64),
    **dict.fromkeys(("steps", "grad_scale", "found_inf"), torch.float32),
    **dict.fromkeys(("tensors", "segments"), torch.int64),
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
        """Compiles for the dtypes of the arguments; nothing is specialised to their values."""
        if self._compiled is None:
            args = list(map(ARGUMENTS.__getitem__, self.arguments))
            with torch.cuda.device(self._device):
                self._compiled = self._compile(args, self._options)
                for most in MORE_REGISTERS:
                    spills_many = self._compiled.n_spills > FEW_SPILLS
                    if spills_many and most > self._options.get("maxnreg", math.inf):
                        self._compiled = self._compile(args, {**self._options, "maxnreg": most})
        return self._compiled

    def _compile(self, args: Sequence[torch.dtype | int], options: Mapping[str, Any]) -> Any:
        compiled = self._kernel.warmup(*args, grid=(1,), **self._constants, **options)
        compiled[1, 1, 1]  # loads it, so that its registers are known
        return compiled

    def __call__(self, programs: int, *args: Tensor | int) -> None:
        if INTERPRETED:
            self._kernel[programs,](*args, **self._constants)
            return
        compiled = self.compiled()
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


# --- What kernels are compiled for


class Dtypes(NamedTuple):
    """The combination of dtypes that a kernel is compiled for."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    averaged: torch.dtype  # of max_exp_avg_sq with amsgrad, else of exp_avg_sq itself
    weight: torch.dtype  # of what is updated: masters, their remainders in int16, or parameters themselves

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.averaged, torch.float32)

    @property
    def vector(self) -> int:
        """Elements of the widest operand in 128 bits. Narrower ones then come in 64 or 32 bits, but each access of a
        warp is one stretch of memory; 128 bits of all would leave gaps in the wide ones' accesses."""
        return ALIGNMENT // max(dtype.itemsize for dtype in self)


class Variant(NamedTuple):
    """Names what kernels are compiled for besides dtypes."""

    amsgrad: bool
    master: bool
    stochastic: bool
    adds_l2: bool = False
    coded: bool = False  # whether any tensor's moments are kept in 8 bits
    cautious: bool = False  # whether any group decays cautiously
    averages: bool = False  # whether weights are averaged


def variant_of(bucket: Bucket, dtypes: Dtypes, coded: bool) -> Variant:
    stochastic = bucket.options.stochastic_rounding and dtypes.param == torch.bfloat16
    adds_l2, cautious = bucket.options.decay == "l2", any(row.cautious for row in bucket.hyper.rows)
    masters, averages = bool(bucket.state.masters), bool(bucket.state.ema_params)
    return Variant(bucket.amsgrad, masters, stochastic, adds_l2, coded, cautious, averages)


@cache
def launcher_for(
    kernel: Any, device: torch.device, dtypes: Dtypes, variant: Variant, sum_grads: bool = False
) -> Launcher:
    # On the CPU nothing is compiled: it is interpreted, or a benchmark leaves launches out.
    warp_size = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
    options = compile_options(kernel, dtypes, torch.version.hip is not None, warp_size)
    return Launcher(kernel, device, constants_for(dtypes, variant, sum_grads), options)


# What the kernels see of that: Triton's dtypes, and elements in an access, in a block, and in one of the shorter blocks
# where elements are taken singly, whose masks and addresses take many registers.
Config = cast(Any, namedtuple("Config", [*Dtypes._fields, "compute", "vector", "block", "tail", *Variant._fields]))


def constants_for(dtypes: Dtypes, variant: Variant, sum_grads: bool) -> dict[str, Any]:
    """Returns the compile-time constants by the kernels' names for them."""
    vectors = THREADS * dtypes.vector
    # Tensors without codes are few and small among those that have them, and must not be what decides about registers.
    sizes = dtypes.vector, vectors if variant.coded else LOADS_IN_FLIGHT * vectors, vectors // 2
    names = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, dtypes.compute))
    config = Config(*(getattr(tl, name) for name in names), *sizes, *variant)
    return {"CONFIG": config, "GRAD": config.grad, "COMPUTE": config.compute, "SUM_GRADS": sum_grads}


def compile_options(kernel: Any, dtypes: Dtypes, hip: bool, warp_size: int) -> dict[str, Any]:
    # Fusion is said aloud, since Triton means to change its default.
    options: dict[str, Any] = {"num_warps": THREADS // warp_size, "enable_fp_fusion": True}
    if kernel is kernels.exact_step_kernel:
        options["launch_cooperative_grid"] = True
    return options if hip else {**options, "maxnreg": most_registers(kernel, dtypes)}


def most_registers(kernel: Any, dtypes: Dtypes) -> int:
    """Returns so few that enough programs are resident: 96 let 5 be, 128 let 4. Left alone NVIDIA's compiler takes up
    to 255 for some kernels.

    Found by compiling for sm_80, sm_90, sm_100 and sm_120. On the last one some kernels for 16-bit weights and 8-bit
    moments spill in their loops, as do float64's on sm_100: `Launcher` gives them more.
    """
    has_16_bits = dtypes.weight.itemsize == dtypes.exp_avg.itemsize == 2
    return 96 if kernel is kernels.exact_step_kernel and has_16_bits else 128


@cache
def programs_on(kernel: Any, device: torch.device, dtypes: Dtypes, variant: Variant) -> int:
    """Returns as many programs of the kernel as the device holds at once."""
    if INTERPRETED:
        return INTERPRETED_PROGRAMS
    return resident_programs(launcher_for(kernel, device, dtypes, variant, sum_grads=True).compiled(), device)


def resident_programs(compiled: Any, device: torch.device) -> int:
    """Returns how many programs of a compiled kernel a device holds at once. A larger grid would run in waves, of which
    the last is thin, and could not be launched cooperatively."""
    properties: Any = torch.cuda.get_device_properties(device)
    registers = max(8, -(-compiled.n_regs // 8) * 8)  # given out in units of 8 for each thread
    if torch.version.hip is not None and properties.gcnArchName.partition(":")[0] in CDNA:
        programs = SIMDS * (REGISTERS_OF_SIMD // registers) * properties.warp_size // THREADS
    else:
        programs = properties.regs_per_multiprocessor // (registers * THREADS)
    limits: tuple[int, ...] = (
        PROGRAMS_PER_MULTIPROCESSOR,
        properties.max_threads_per_multi_processor // THREADS,
        programs,
    )
    multiprocessors: int = properties.multi_processor_count
    return max(1, min(limits)) * multiprocessors


# --- What a device can launch

# Devices that have refused a cooperative launch of as many programs as they should hold.
_refused_cooperation: set[torch.device] = set()


def can_launch_cooperatively(device: torch.device) -> bool:
    return device not in _refused_cooperation and _driver_launches_cooperatively(device)


def refuses_cooperation(error: RuntimeError, device: torch.device) -> bool:
    """Returns whether this error of a launch is a refusal of its grid, and remembers that, with a warning. Nothing has
    run then. Under MPS and in green contexts a device has fewer multiprocessors than its properties say."""
    if not is_too_large_a_grid(str(error)):
        return False
    _refused_cooperation.add(device)
    warn_user(
        f"{device} refused a cooperative launch of one program for each place that it should have: it seems to have "
        "fewer multiprocessors than its properties say, as under MPS or in a green context. FusedAdamS goes on with "
        "two launches for each step.",
    )
    return True


# cudaErrorCooperativeLaunchTooLarge, and HIP's error of the same number. Triton 3.6 to 3.9 raise "Triton Error [HIP]:
# Code: 720, Messsage: ..." on ROCm. On CUDA they raise the driver's words alone, without a number.
TOO_LARGE = 720
TOO_LARGE_IN_WORDS = "too many blocks in cooperative launch"


def is_too_large_a_grid(message: str) -> bool:
    """Returns whether the message of an error stands for code 720: by the number, the usual words or this driver's."""
    if re.search(rf"\bcode:? *{TOO_LARGE}\b", message, re.IGNORECASE):
        return True
    return any(words and words in message.lower() for words in (TOO_LARGE_IN_WORDS, _words_of_cuda_driver(TOO_LARGE)))


@cache
def _words_of_cuda_driver(code: int) -> str | None:
    """Returns what the CUDA driver calls an error, in lower case; None where there is no driver, or it has no words."""
    try:
        describe = ctypes.CDLL("libcuda.so.1").cuGetErrorString
    except (OSError, AttributeError):
        return None
    words = ctypes.c_char_p()
    failed = describe(code, ctypes.byref(words)) != 0
    return None if failed or not words.value else words.value.decode(errors="replace").lower()


@cache
def _driver_launches_cooperatively(device: torch.device) -> bool:
    """All CUDA devices that Triton serves can. Of AMD's the driver tells; an old Triton (3.6) does not ask it."""
    if torch.version.hip is None:
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return bool(properties.get("cooperativeLaunch", 1))


@cache
def why_not_launchable(device: torch.device) -> str | None:
    """Returns what keeps Triton from launching anything on this device, found by loading a small kernel; None if
    nothing does. Triton compiles a part of its launcher in C at first use, so without a compiler it cannot launch."""
    if INTERPRETED:
        return None
    try:
        Launcher(kernels.last_exp_avg_sq_sum_kernel, device, {}, {}).compiled()
    except Exception as error:  # of whichever kind: a compiler that is missing, or fails, or is too old for the device
        return f"Triton cannot launch kernels here ({type(error).__name__}: {error})"
    return None
