"""How the kernels are compiled: constants, options and registers for each combination of dtypes, and their grids."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from swd_fused.backends.triton import launch as triton_launch
from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.launch import THREADS, Launcher, resident_programs
from swd_fused.backends.triton.parts import LOADS_IN_FLIGHT, Dtypes
from swd_fused.tensors.bucket import Bucket

# Blocks of 8-bit codes that a program takes at once, a multiple of its warps.
BLOCKS_IN_FLIGHT = 4


class Variant(NamedTuple):
    """Names what kernels are compiled for besides dtypes."""

    amsgrad: bool
    master: bool
    stochastic: bool
    adds_l2: bool = False
    coded: bool = False  # whether any tensor's moments are kept in 8 bits


def variant_of(bucket: Bucket, dtypes: Dtypes, coded: bool) -> Variant:
    stochastic = bucket.options.stochastic_rounding and dtypes.param == torch.bfloat16
    return Variant(bucket.amsgrad, bool(bucket.masters), stochastic, bucket.options.decay == "l2", coded)


@cache
def launcher_for(
    kernel: Any, device: torch.device, dtypes: Dtypes, variant: Variant, sum_grads: bool = False
) -> Launcher:
    # On the CPU nothing is compiled: it is interpreted, or a benchmark leaves launches out.
    warp_size = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
    options = compile_options(kernel, dtypes, torch.version.hip is not None, warp_size)
    return Launcher(kernel, device, constants_for(dtypes, variant, sum_grads), options)


def constants_for(dtypes: Dtypes, variant: Variant, sum_grads: bool) -> dict[str, Any]:
    flags = {name.upper(): value for name, value in variant._asdict().items()}
    constants = {**dtypes.constants(), **flags, "CODED": 0, "SUM_GRADS": sum_grads}
    if variant.coded:
        # Tensors without codes are few and small then, and must not be what decides about registers.
        constants.update(CODED=BLOCKS_IN_FLIGHT, BLOCK=constants["BLOCK"] // LOADS_IN_FLIGHT)
    return constants


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
    if triton_launch.INTERPRETED:
        return triton_launch.INTERPRETED_PROGRAMS
    return resident_programs(launcher_for(kernel, device, dtypes, variant, sum_grads=True).compiled(), device)
