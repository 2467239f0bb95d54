"""How the kernels are compiled: constants, options and registers for each combination of dtypes, and their grids."""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl

from swd_fused.backends.triton import launch as triton_launch
from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.launch import THREADS, Launcher, resident_programs
from swd_fused.backends.triton.parts import Dtypes
from swd_fused.core.bucket import Bucket

# Of each operand, in an update. An update waits for all that it has asked for, so with one load of 128 bits and the
# registers that it takes, 5 programs on a multiprocessor had 30 to 40 KB on their way; a B200 needs 42.
LOADS_IN_FLIGHT = 2

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,  # remainders of masters
}


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
    config = Config(*(TRITON_DTYPES[dtype] for dtype in (*dtypes, dtypes.compute)), *sizes, *variant)
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
    if triton_launch.INTERPRETED:
        return triton_launch.INTERPRETED_PROGRAMS
    return resident_programs(launcher_for(kernel, device, dtypes, variant, sum_grads=True).compiled(), device)
