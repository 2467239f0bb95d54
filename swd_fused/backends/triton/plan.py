"""What the Triton backend keeps of a bucket from step to step."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.backends.triton import launch as triton_launch
from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.kernels.tables import SLOT_COLUMNS
from swd_fused.backends.triton.launch import PLAIN_REGISTERS, THREADS, Launcher, resident_programs
from swd_fused.backends.triton.operands import Operands
from swd_fused.backends.triton.parts import FLOAT32_VECTOR, Dtypes, Part
from swd_fused.buckets import Bucket
from swd_fused.stochastic_rounding import rounding_start
from swd_fused.upload import upload

# What exact_step_kernel is passed, for compiling it before any of that exists.
EXACT_STEP_ARGUMENTS = (
    *(torch.float64, torch.float64, torch.float64, torch.float32, torch.int32),
    *(torch.int64, torch.int64, torch.int32, torch.float64, torch.float64, torch.float32, torch.float32, 0),
)


class Plan:
    """The operands; the parts, with the sums of their second moments; and small tensors that live on the device."""

    def __init__(self, bucket: Bucket) -> None:
        self.parts: list[Part] = []
        self.one, self.zero = (torch.full((), x, dtype=torch.float64, device=bucket.device) for x in (1.0, 0.0))
        self.no_scale, self.no_inf = self.one.float(), self.zero.float()  # as GradScaler has them
        self.last: Tensor | None = None  # what lagged_step_kernel finds, if it was that kernel's turn the last time
        self.beta2s_of_last: list[float] = []  # by group
        self._operands = Operands()
        self._limits: dict[tuple[float | None, int], Tensor] = {}

    @property
    def table(self) -> Tensor:
        return self._operands.table

    def begin(self, bucket: Bucket) -> None:
        """Before the first pass of a step."""
        if self._operands.refresh(bucket) or not self.parts:
            self._make_parts(bucket)

    def end(self, bucket: Bucket) -> None:
        """After an update."""
        self._operands.write_back(bucket)
        bucket.count_writes()

    def launcher(self, kernel: Any, bucket: Bucket, part: Part, sum_grads: bool = False) -> Launcher:
        return launcher_for(kernel, bucket.device, part.dtypes, variant_of(bucket, part.dtypes), sum_grads)

    def new_totals(self, bucket: Bucket) -> Tensor:
        """A row for each part, with the columns of `slots`."""
        return torch.empty(len(self.parts), SLOT_COLUMNS.value, dtype=torch.float64, device=bucket.device)

    def find_last(self, bucket: Bucket, part: Part, last: Tensor) -> None:
        run = self.launcher(kernels.last_exp_avg_sq_sum_kernel, bucket, part)
        run(1, last, part.sums, bucket.steps, self.table, part.segments, bucket.hyper.table, part.n_segments)

    def limits(self, bucket: Bucket, max_grad_norm: float | None = None) -> Tensor:
        key = max_grad_norm, bucket.numel
        if key not in self._limits:
            options = bucket.options
            values = [
                max(1, bucket.numel),
                math.inf if max_grad_norm is None else max_grad_norm,
                options.skip_nonfinite,
                0 if options.rounding_seed is None else rounding_start(options.rounding_seed),
            ]
            limits = torch.tensor(values, dtype=torch.float64, device="cpu")
            self._limits[key] = upload(limits, bucket.device)
        return self._limits[key]

    def _make_parts(self, bucket: Bucket) -> None:
        numels: defaultdict[Dtypes, dict[int, int]] = defaultdict(dict)
        moments = bucket.exp_avgs, bucket.exp_avg_sqs, bucket.averaged
        operands = bucket.params, bucket.grads_or_params, *moments, bucket.masters or bucket.params
        for tensor, (param, *others) in enumerate(zip(*operands, strict=True)):
            numels[Dtypes(param.dtype, *(other.dtype for other in others))][tensor] = param.numel()
        self.parts = [
            Part(dtypes, by_tensor, programs_on(bucket.device, dtypes, variant_of(bucket, dtypes)), bucket.device)
            for dtypes, by_tensor in numels.items()
        ]
        self.last = None
        for part in self.parts:
            run = self.launcher(kernels.stored_sums_kernel, bucket, part)
            run(part.programs, part.sums, self.table, part.segments, part.program_segments, bucket.hyper.table)


class Variant(NamedTuple):
    """What kernels are compiled for besides dtypes."""

    amsgrad: bool
    master: bool
    stochastic: bool


def variant_of(bucket: Bucket, dtypes: Dtypes) -> Variant:
    stochastic = bucket.options.rounding_seed is not None and dtypes.param == torch.bfloat16
    return Variant(bucket.amsgrad, bool(bucket.masters), stochastic)


@cache
def launcher_for(
    kernel: Any, device: torch.device, dtypes: Dtypes, variant: Variant, sum_grads: bool = False
) -> Launcher:
    # On the CPU nothing is compiled: it is interpreted, or a benchmark leaves launches out.
    warp_size = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
    options = compile_options(kernel, dtypes, variant, torch.version.hip is not None, warp_size)
    return Launcher(kernel, device, constants_for(dtypes, variant, sum_grads), options)


def constants_for(dtypes: Dtypes, variant: Variant, sum_grads: bool) -> dict[str, Any]:
    flags = {name.upper(): value for name, value in variant._asdict().items()}
    return {**dtypes.constants(), **flags, "SUM_GRADS": sum_grads}


def compile_options(kernel: Any, dtypes: Dtypes, variant: Variant, hip: bool, warp_size: int) -> dict[str, Any]:
    # Fusion is said aloud, since Triton means to change its default.
    options: dict[str, Any] = {"num_warps": THREADS // warp_size, "enable_fp_fusion": True}
    if kernel is kernels.exact_step_kernel:
        options["launch_cooperative_grid"] = True
    return options if hip else {**options, "maxnreg": most_registers(kernel, dtypes, variant)}


def most_registers(kernel: Any, dtypes: Dtypes, variant: Variant) -> int:
    """So few that many programs are resident, and so many that nothing is spilled: found by compiling for sm_80, sm_90
    and sm_100. Left alone NVIDIA's compiler takes more in the plain float32 step, and spills some elsewhere."""
    if dtypes.vector != FLOAT32_VECTOR or kernel is kernels.update_kernel:
        return 128
    if variant.amsgrad:
        return 96 if kernel is kernels.exact_step_kernel else 128
    if kernel is not kernels.exact_step_kernel:
        return 96
    if variant.master or variant.stochastic:
        return 80
    return PLAIN_REGISTERS if dtypes.grad.itemsize == torch.float32.itemsize else 72


@cache
def programs_on(device: torch.device, dtypes: Dtypes, variant: Variant) -> int:
    """As many as can wait for one another in exact_step_kernel. The other kernels are launched alike."""
    if triton_launch.INTERPRETED:
        return triton_launch.INTERPRETED_PROGRAMS
    launcher = launcher_for(kernels.exact_step_kernel, device, dtypes, variant)
    return resident_programs(launcher.compiled(*EXACT_STEP_ARGUMENTS), device)
