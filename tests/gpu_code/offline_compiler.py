"""The package's kernels, compiled for GPUs that are not here, as the backend would have them compiled there."""

from __future__ import annotations

import functools
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.launch import (
    ARGUMENTS,
    FEW_SPILLS,
    Variant,
    compile_options,
    constants_for,
    options_in_turn,
)

from .machine_code import MachineCode, read_amdgcn, read_cubin

PROCESSES = 2
ARCHITECTURES: list[int | str] = [80, 90, 100, 120, "gfx942"]
# For which one kernel of each kind is compiled, since all would take too long: a T4; an RTX 3090 or A10; an RTX 4090 or
# L4, whose code is that of sm_86. Exact steps can clip; bfloat16 in 8 bits rounds by chance.
EACH_KIND = (
    ("exact_step_kernel", "fp32"),
    ("exact_step_kernel", "bf16"),
    ("exact_step_kernel", "bf16 with masters"),
    ("exact_step_kernel", "fp32 in 8 bits"),
    ("lagged_step_kernel", "fp32"),
    ("lagged_step_kernel", "bf16 in 8 bits"),
)
FURTHER_ARCHITECTURES = {
    75: EACH_KIND,
    86: EACH_KIND,
    89: (("exact_step_kernel", "fp32"), ("lagged_step_kernel", "bf16 in 8 bits")),
}

F32, F64, BF16, F16, I16 = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16


class Configuration(NamedTuple):
    variant: Variant
    sum_grads: bool = True


CONFIGURATIONS = {
    "fp32": Configuration(Variant(F32, F32, F32, F32, F32, F32)),
    "bf16": Configuration(Variant(BF16, BF16, F32, F32, F32, BF16)),
    "fp16": Configuration(Variant(F16, F16, F32, F32, F32, F16)),
    "fp64": Configuration(Variant(F64, F64, F64, F64, F64, F64)),
    "fp32 with bf16 gradients": Configuration(Variant(F32, BF16, F32, F32, F32, F32)),
    "bf16 with masters": Configuration(Variant(BF16, BF16, F32, F32, F32, I16, master=True)),
    "fp16 with masters": Configuration(Variant(F16, F16, F32, F32, F32, F32, master=True)),
    "bf16 rounded by chance": Configuration(Variant(BF16, BF16, F32, F32, F32, BF16, stochastic=True)),
    "bf16 with bf16 exp_avg": Configuration(Variant(BF16, BF16, BF16, F32, F32, BF16)),
    "fp32 in 8 bits": Configuration(Variant(F32, F32, F32, F32, F32, F32, coded=True)),
    "bf16 in 8 bits": Configuration(Variant(BF16, BF16, F32, F32, F32, BF16, coded=True, stochastic=True)),
    "bf16 with masters in 8 bits": Configuration(Variant(BF16, BF16, F32, F32, F32, I16, coded=True, master=True)),
    "fp32 amsgrad in 8 bits": Configuration(Variant(F32, F32, F32, F32, F32, F32, coded=True, amsgrad=True)),
    "fp32 with l2": Configuration(Variant(F32, F32, F32, F32, F32, F32, adds_l2=True)),
    "fp32 cautious": Configuration(Variant(F32, F32, F32, F32, F32, F32, cautious=True)),
    "fp32 amsgrad": Configuration(Variant(F32, F32, F32, F32, F32, F32, amsgrad=True)),
}


class Binary(NamedTuple):
    """What became of a kernel. `ptx` is empty on AMD."""

    ptx: str
    threads: int
    shared_bytes: int
    is_cooperative: bool
    code: MachineCode
    spills_many_at_first: bool  # then it was compiled again with more registers, as `Launcher` would


@functools.cache
def submit(kernel: str, arch: int | str, configuration: Configuration) -> Future[Binary]:
    """Compiling goes on in other processes, to which kernels go by name."""
    return _processes().submit(compile_kernel, kernel, arch, configuration)


@functools.cache
def _processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))


def compile_kernel(name: str, arch: int | str, configuration: Configuration) -> Binary:
    kernel = getattr(kernels, name)
    variant, sum_grads = configuration
    constants = constants_for(variant, sum_grads)
    names = kernel.arg_names
    types = argument_types()
    source = ASTSource(
        fn=kernel,
        signature={key: "constexpr" if key in constants else types[key] for key in names},
        constexprs={(i,): constants[key] for i, key in enumerate(names) if key in constants},
        attrs={
            (param.num,): [["tt.divisibility", 16]]
            for param in kernel.params
            if types.get(param.name, "").startswith("*") and not param.do_not_specialize_on_alignment
        },
    )
    is_amd = isinstance(arch, str)
    warp_size = 64 if is_amd else 32
    options = compile_options(kernel, variant, is_amd, warp_size)
    target = GPUTarget("hip" if is_amd else "cuda", arch, warp_size)
    tried = 0
    for tried, each in enumerate(options_in_turn(options)):  # noqa: B007
        compiled = triton.compile(source, target=target, options=dict(each))
        code = read_amdgcn(compiled.asm["amdgcn"]) if is_amd else read_cubin(compiled.asm["cubin"])
        if code.stack_bytes <= 4 * FEW_SPILLS:
            break
    return Binary(
        compiled.asm.get("ptx", ""),
        compiled.metadata.num_warps * warp_size,
        compiled.metadata.shared,
        compiled.metadata.launch_cooperative_grid,
        code,
        tried > 0,
    )


def argument_types() -> dict[str, str]:
    """Returns the types of the kernels' arguments by name, in Triton's notation."""
    names: dict[Any, str] = {F64: "*fp64", F32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", 0: "i32"}
    return {name: names[kind] for name, kind in ARGUMENTS.items()}
