"""The sections of the report about a GPU. Each runs in a process of its own, and yields what it has found so far."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import gpu, gpu_kernels, gpu_launches, gpu_modes, step_time
from benchmarks.step_times.contenders import GPU_CONTENDERS, Contender, gpu_peers, parameters, taking_part
from benchmarks.step_times.harness import Quartiles, interleaved_times, measure, milliseconds
from benchmarks.step_times.suites import Suite
from swd_fused.__main__ import devices, version_of, versions

Row = dict[str, Any]
T = TypeVar("T")

PEERS = ("apex", "bitsandbytes", "flashoptim", "torchao")
COUNTED = ("FusedAdamS exact (triton)", "FusedAdamS lagged (triton)", "FusedAdamS exact + clip (triton)", "AdamW f")
VIRTUAL = "virtual"  # how the name of tests/virtual_gpu's device begins
WALL_CLOCK_REPEATS = 7


@dataclass
class Result:
    """Holds what a section has found. `problem` is what went wrong, None if nothing did."""

    text: str
    problem: str | None = None
    outcome: str = "ok"
    step_rows: list[Row] = field(default_factory=list)
    mode_rows: list[Row] = field(default_factory=list)


def environment_section() -> Iterator[Result]:
    peers = ", ".join(f"{package} {version_of(package)}" for package in PEERS)
    free, total = torch.cuda.mem_get_info()
    memory = f"memory    {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    driver = f"driver    {gpu.driver_version()}"
    lines = [versions(), f"commit    {commit()}", devices(), driver, memory, f"peers     {peers}"]
    note = ""
    if torch.cuda.get_device_name().startswith(VIRTUAL):
        note = (
            "**This is the virtual GPU of tests/virtual_gpu: nothing ran on hardware, and no time or rate means "
            "anything. Its profiler shows Triton's kernels alone.**\n\n"
        )
    yield Result(f"{note}```text\n{chr(10).join(lines)}\n```")


def commit() -> str:
    """Returns the source's, and whether it was changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = attempted(partial(subprocess.run, command, capture_output=True, text=True, timeout=10, check=True))
    return "not known: no git clone" if isinstance(done, Exception) else done.stdout.strip()


def kernels_section() -> Iterator[Result]:
    """Yields after each kernel, so that one whose compiler crashes is the first one that is missing."""
    rows: list[list[str]] = []
    for kernel in gpu_kernels.compiled_kernels():
        numbers = kernel.registers, kernel.spills, kernel.programs, "yes" if kernel.is_cooperative else "no"
        rows.append([kernel.kernel, kernel.mode, *map(str, numbers), f"{kernel.seconds:.1f}"])
        yield Result(kernels_text(rows))


def kernels_text(rows: Sequence[Sequence[str]]) -> str:
    headings = ["kernel", "mode", "registers", "spills", "programs per multiprocessor", "cooperative", "s to compile"]
    expected = len(gpu_kernels.kernels_of_modes())
    return (
        f"{len(rows)} of {expected} kernels as the modes have them compiled; none is launched here. Registers and "
        "spills are those of a thread, as the driver states them.\n\n" + markdown_table(headings, rows)
    )


def mode_section(name: str, device: str = "cuda", backend: str = "triton") -> Iterator[Result]:
    """Checks one mode. The largest difference is a multiple of what is allowed."""
    (mode,) = (mode for mode in gpu_modes.MODES if mode.name == name)
    far = gpu_modes.difference(mode, device, backend)
    outcome = f"{far:.2g} of the difference allowed"
    yield Result("", None if far <= 1 else f"differs: {outcome}", f"agrees, {outcome}")


def step_times_section(name: str, suite: Suite, repeats: int) -> Iterator[Result]:
    among = [c for c in (*GPU_CONTENDERS, *gpu_peers()) if c.backend not in ("torch", "loop")]
    contenders, errors = usable(taking_part(among, suite.shapes))
    rows = measure(step_time.case_of(name, suite, contenders, repeats, "cuda"))
    # What follows might hang, so that the times until here are kept first.
    result = Result("\n\n".join([step_times_text(rows, {}), *left_out(errors)]), raising(errors), step_rows=rows)
    yield result
    result.text = "\n\n".join([step_times_text(rows, wall_clock(suite, contenders)), *left_out(errors)])
    yield result


def wall_clock(suite: Suite, contenders: Sequence[Contender]) -> dict[str, float]:
    """Returns the median seconds of a step by the wall clock, by contender. They take turns here, too."""
    params = parameters(suite.shapes, device="cuda")
    steps = [contender.build(params) for contender in contenders]
    times = interleaved_times(steps, min(suite.repeats, WALL_CLOCK_REPEATS), lambda: None, gpu.wall_timed)
    return {c.name: Quartiles.of(seconds).median for c, seconds in zip(contenders, times, strict=True)}


def usable(contenders: Sequence[Contender]) -> tuple[list[Contender], dict[str, Exception]]:
    """Returns those that can take steps here with their peers, and what the others raise."""
    outcomes = {contender.name: attempted(partial(take_steps, contender)) for contender in contenders}
    errors = {name: error for name, error in outcomes.items() if error is not None}
    return [c for c in contenders if not {c.name, c.peer} & errors.keys()], errors


def take_steps(contender: Contender) -> None:
    step = contender.build(parameters([(64, 65), (30,)], device="cuda"))
    for _ in range(2):
        step()
    torch.cuda.synchronize()


def step_times_text(rows: Sequence[Row], on_the_wall: dict[str, float]) -> str:
    first = rows[0]
    cells = [
        [
            row["contender"],
            milliseconds(row["median_s"]),
            f"{milliseconds(row['q1_s'])} - {milliseconds(row['q3_s'])}",
            milliseconds(on_the_wall[row["contender"]]) if row["contender"] in on_the_wall else "",
            f"{row['ratio']:.2f}",
            "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}",
            share_text(row["share_of_peak"]),
        ]
        for row in rows
    ]
    others = first["other_load"]
    load = "" if others is None else f"Other processes used {others:.1f} cores of the CPU meanwhile."
    headings = ["optimizer", "device's median ms", "quartiles ms", "wall clock ms", "ratio", "GB/s", "of peak"]
    return (
        f"{first['elements']:,} elements in {first['tensors']:,} tensors of {first['dtype']}, {first['repeats']} "
        "repeats. All take turns; the ratio of medians is to AdamW fused, with clipping to AdamW fused + "
        f"clip_grad_norm_. The device's time is without the host's work. By the wall clock it is a step of "
        f"{gpu.STEPS_IN_A_ROW} in a row: the host's work or the device's, whichever takes longer. {load}\n\n"
        + markdown_table(headings, cells)
    )


def peak_section(elements: int, repeats: int) -> Iterator[Result]:
    steps = {m: attempted(partial(gpu_modes.step_of, m, elements)) for m in gpu_modes.MODES if m.is_measured}
    errors = {mode.name: step for mode, step in steps.items() if isinstance(step, Exception)}
    working = {mode: step for mode, step in steps.items() if not isinstance(step, Exception)}
    if not working:
        raise next(iter(errors.values()))
    rows = gpu_modes.measured(working, elements, repeats)
    yield Result("\n\n".join([peak_text(rows), *left_out(errors)]), raising(errors), mode_rows=rows)


def peak_text(rows: Sequence[Row]) -> str:
    first = rows[0]
    peak = first["peak_gb_per_s"]
    known = "not known for this device" if peak is None else f"{peak:,.0f} GB/s"
    cells = [
        [
            row["mode"],
            f"{row['bytes_per_element']:g}",
            milliseconds(row["median_s"]),
            "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}",
            share_text(row["share_of_peak"]),
        ]
        for row in rows
    ]
    return (
        f"One matrix of {first['elements']:,} elements, {first['repeats']} repeats, which take turns. Peak: {known}. "
        "Bytes for each element are those that docs/notes/gpu.md has, counted in an emulator.\n\n"
        + markdown_table(["mode", "bytes", "median ms", "GB/s", "of peak"], cells)
    )


def launches_section(shapes: Sequence[tuple[int, ...]]) -> Iterator[Result]:
    chosen = [c for c in GPU_CONTENDERS if c.name.startswith(COUNTED) and "clip_grad" not in c.name]
    rows, errors = [], {}
    for contender in chosen:
        counts = attempted(lambda c=contender: gpu_launches.counted(c.build(parameters(shapes, device="cuda"))))
        if isinstance(counts, Exception):
            errors[contender.name] = counts
        else:
            rows.append([contender.name, *launches_cells(counts)])
    text = (
        f"A steady step of {len(shapes)} tensors, by torch.profiler; waits are those that it or torch's debug mode "
        "saw, whichever are more. One kernel of ours does the step, a few of torch's count clipped steps. Where it "
        "saw no kernel at all, as without CUPTI or its permissions, nothing is known of copies either.\n\n"
    )
    table = markdown_table(["optimizer", "kernels", "copies", "waits of the host"], rows)
    yield Result("\n\n".join([text + table, *left_out(errors)]), raising(errors))


def launches_cells(counts: dict[str, int]) -> list[str]:
    """A step without a kernel is none: then the profiler has not seen it."""
    seen = [str(counts[kind]) if counts["kernels"] else "not seen" for kind in ("kernels", "copies")]
    return [*seen, str(counts["waits"])]


def attempted(run: Callable[[], T]) -> T | Exception:
    try:
        return run()
    except Exception as error:
        return error


def left_out(errors: dict[str, Exception]) -> list[str]:
    return [f"{name} is left out:\n\n{traceback_block(error)}" for name, error in errors.items()]


def raising(errors: dict[str, Exception]) -> str | None:
    return f"raise: {', '.join(errors)}" if errors else None


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def share_text(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def traceback_block(error: BaseException) -> str:
    return f"```text\n{''.join(traceback.format_exception(error)).rstrip()}\n```"
