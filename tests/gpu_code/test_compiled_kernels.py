"""The package's kernels in machine code: registers, spills, widths of access, for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

from swd_fused.backends.triton.kernels import kernels, passes, tables
from swd_fused.backends.triton.launch import FEW_SPILLS, Launcher, resident_programs

from .offline_compiler import ARCHITECTURES, CONFIGURATIONS, FURTHER_ARCHITECTURES, submit

CODED = [configuration for configuration, (variant, _) in CONFIGURATIONS.items() if variant.coded]
KERNELS = [name for name in vars(kernels) if name.endswith("_kernel")]
CASES = [
    *(("exact_step_kernel", arch, configuration) for configuration in CONFIGURATIONS for arch in ARCHITECTURES),
    *((kernel, arch, "fp32") for kernel in KERNELS if kernel != "exact_step_kernel" for arch in ARCHITECTURES),
    *(("lagged_step_kernel", 120, configuration) for configuration in CONFIGURATIONS if configuration != "fp32"),
    *(("update_kernel", 90, configuration) for configuration in ("bf16", "fp64", "bf16 with masters", "fp32 amsgrad")),
    *((kernel, 90, "fp32 amsgrad") for kernel in ("max_exp_avg_sq_sum_kernel", "stored_sums_kernel")),
    *(("lagged_step_kernel", arch, configuration) for configuration in CODED for arch in (80, 90, 100)),
    *((kernel, 90, "fp32 in 8 bits") for kernel in ("update_kernel", "stored_sums_kernel")),
    ("max_exp_avg_sq_sum_kernel", 90, "fp32 amsgrad in 8 bits"),
    *((kernel, arch, kind) for arch, own in FURTHER_ARCHITECTURES.items() for kernel, kind in own),
]


def cases(*wanted: Callable[..., bool]) -> pytest.MarkDecorator:
    """Those for an H100 in float32, each kernel once, and each configuration of the exact step; others are slow."""
    chosen = [case for case in CASES if all(condition(*case) for condition in wanted)]
    return pytest.mark.parametrize(
        ("kernel", "arch", "configuration"),
        [pytest.param(*case, marks=() if is_quick(*case) else pytest.mark.slow) for case in chosen],
    )


def is_quick(kernel: str, arch: int | str, configuration: str) -> bool:
    if kernel == "exact_step_kernel":
        return arch == 90 or (arch == "gfx942" and configuration == "fp32")
    return (arch, configuration) == (90, "fp32")


def is_exact(kernel: str, arch: int | str, configuration: str) -> bool:
    return kernel == "exact_step_kernel"


def has_loops_in_sass(kernel: str, arch: int | str, configuration: str) -> bool:
    return isinstance(arch, int) and not kernel.startswith("last_")


# 128-bit accesses in the code: 8 of pass 1 and two for each operand of the update that has 128 bits for each thread.
# Where compilers unroll loops there are more. With codes, two for each operand of tensors that have them, and one of
# those that have none.
WIDE = {
    "fp32": (8 + 2 * 4, 2 * 3),
    "bf16": (8 + 2 * 2, 2 * 2),
    "fp16": (8 + 2 * 2, 2 * 2),
    "fp64": (8 + 2 * 4, 2 * 3),
    "fp32 with bf16 gradients": (8 + 2 * 3, 2 * 3),
    "bf16 with masters": (8 + 2 * 2, 2 * 2),
    "fp16 with masters": (8 + 2 * 3, 2 * 3),
    "bf16 rounded by chance": (8 + 2 * 2, 2 * 2),
    "bf16 with bf16 exp_avg": (8 + 2 * 1, 2 * 1),
    "fp32 with l2": (8 + 2 * 4, 2 * 3),
    "fp32 cautious": (8 + 2 * 4, 2 * 3),
    "fp32 amsgrad": (8 + 2 * (3 + 5), 2 * 4),
    "fp32 in 8 bits": (8 + 2 * 2 + 4, 2 * 1 + 3),
    "bf16 in 8 bits": (8 + 2 * 0 + 2, 2 * 0 + 2),
    "bf16 with masters in 8 bits": (8 + 2 * 0 + 2, 2 * 0 + 2),
    "fp32 amsgrad in 8 bits": (8 + 2 * (2 + 3) + 3 + 5, 2 * 2 + 4),
}

# What a B200 needs on their way to each multiprocessor: 8 TB/s at 800 ns, of 148 multiprocessors.
ENOUGH_IN_FLIGHT = 42 * 1024

# An RTX 5090, the fastest with sm_120, needs a fifth of that: 1.8 TB/s at 800 ns, of 170 multiprocessors. Its compiler
# takes more registers, so that some kernels have 3 programs resident there. An RTX 3090 needs 9 KB as well, an RTX 4090
# and a T4 6.
ENOUGH_WITH_SLOWER_MEMORY = 9 * 1024
SLOWER_MEMORY = {75, 86, 89, 120}
THREADS_OF_MULTIPROCESSOR = {75: 1024, 86: 1536, 89: 1536, 120: 1536}
COMPILED_TWICE = {
    ("exact_step_kernel", 120, "bf16 in 8 bits"),
    *(("lagged_step_kernel", 120, kind) for kind in ("fp64", "bf16 in 8 bits", "fp32 amsgrad in 8 bits")),
}

# With codes it is instructions that a B200 waits for. Some 120 for each bfloat16 element let it take 2.9 TB/s, at 128
# lanes of 148 multiprocessors and 1.85 GHz: a third of its bandwidth. An H100 needs 18 KB.
ENOUGH_WITH_CODES = 24 * 1024

# AMD's compiler keeps a few scalars in lanes of vector registers, not in memory.
SCALARS_SPILLED = {("exact_step_kernel", "gfx942", configuration) for configuration in CODED}


@pytest.fixture(scope="module", autouse=True)
def _all_submitted(request: pytest.FixtureRequest) -> None:
    """So that two processes have something to do from the start."""
    for item in request.session.items:
        case = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "kernel" in case:
            submit(case["kernel"], case["arch"], CONFIGURATIONS[case["configuration"]])


@cases()
def test_nothing_is_spilled_in_loops(kernel: str, arch: int | str, configuration: str) -> None:
    """A few scalars of a segment may be, around them."""
    binary = submit(kernel, arch, CONFIGURATIONS[configuration]).result()
    case = kernel, arch, configuration
    if case in SCALARS_SPILLED:
        assert (binary.code.spills <= 16, binary.code.stack_bytes) == (True, 0)
        return
    assert binary.code.spills_in_loops == 0
    assert binary.code.stack_bytes <= (0 if isinstance(arch, str) else 4 * FEW_SPILLS)
    assert binary.code.registers <= 168
    assert binary.spills_many_at_first == (case in COMPILED_TWICE)


@cases(has_loops_in_sass)
def test_enough_is_in_flight_in_each_loop_over_whole_blocks(kernel: str, arch: int, configuration: str) -> None:
    """From registers, the programs that are resident with them, and loads that do not wait for one another."""
    binary = submit(kernel, arch, CONFIGURATIONS[configuration]).result()
    device = SimpleNamespace(
        max_threads_per_multi_processor=THREADS_OF_MULTIPROCESSOR.get(arch, 2048),
        regs_per_multiprocessor=65536,
        multi_processor_count=1,
        warp_size=64 if isinstance(arch, str) else 32,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        programs = resident_programs(SimpleNamespace(n_regs=binary.code.registers), torch.device("cuda"))
    assert binary.code.bytes_in_flight
    enough = ENOUGH_WITH_CODES if configuration in CODED else ENOUGH_IN_FLIGHT
    enough = ENOUGH_WITH_SLOWER_MEMORY if arch in SLOWER_MEMORY else enough
    assert min(binary.code.bytes_in_flight) * binary.threads * programs >= enough


@cases(is_exact)
def test_whole_blocks_are_read_and_written_in_128_bits(kernel: str, arch: int | str, configuration: str) -> None:
    """Of codes in 32 bits. Single ones are for what is not aligned: four of each moment, and of the second one in
    amsgrad's first pass."""
    binary = submit(kernel, arch, CONFIGURATIONS[configuration]).result()
    loads, stores = WIDE[configuration]
    assert binary.code.loads[128] >= loads
    assert binary.code.stores[128] >= stores
    assert binary.threads == 128
    if configuration in CODED and arch in ARCHITECTURES:
        assert binary.code.loads[8] == (12 if "amsgrad" in configuration else 8)
        assert binary.code.stores[8] == 8


@cases(lambda kernel, arch, configuration: configuration == "fp32" and arch in ARCHITECTURES)
def test_only_the_kernel_in_which_programs_wait_is_launched_cooperatively(
    kernel: str, arch: int | str, configuration: str
) -> None:
    assert submit(kernel, arch, CONFIGURATIONS[configuration]).result().is_cooperative == (
        kernel == "exact_step_kernel"
    )


@pytest.mark.parametrize(("needed", "tried"), [(128, [128]), (148, [128]), (170, [128, 168]), (500, [128, 168, 255])])
def test_a_compiler_that_spills_is_given_more_registers(
    monkeypatch: pytest.MonkeyPatch, needed: int, tried: list[int]
) -> None:
    seen = []

    class Loaded(SimpleNamespace):
        def __getitem__(self, grid: tuple[int, int, int]) -> None:
            self.n_spills = max(0, needed - self.registers)

    def warmup(*args: object, grid: tuple[int], maxnreg: int) -> Loaded:
        seen.append(maxnreg)
        return Loaded(registers=maxnreg)

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    kernel = SimpleNamespace(arg_names=[], warmup=warmup)
    compiled = Launcher(kernel, torch.device("cuda"), {}, {"maxnreg": 128}).compiled()
    assert seen == tried
    assert compiled.registers == tried[-1]


def test_kernels_are_compiled_anew_when_columns_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return JITFunction(passes.weigh_sums.fn).cache_key

    before = key()
    monkeypatch.setattr(passes, "TENSOR", tables.Columns("group", "param"))
    assert key() != before
