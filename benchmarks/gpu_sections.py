"""The sections of the report about a GPU. Each runs in a process of its own, and yields what it has found so far."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import gpu, gpu_modes, step_time
from benchmarks.step_times.contenders import GPU_CONTENDERS, Contender, gpu_peers, parameters, speeds, taking_part
from benchmarks.step_times.harness import Case, Row, measure, milliseconds
from benchmarks.step_times.suites import Suite
from swd_fused.__main__ import devices, version_of, versions

T = TypeVar("T")

PEERS = ("apex", "bitsandbytes", "flashoptim", "torchao")
COUNTED = ("FusedAdamS exact (triton)", "FusedAdamS lagged (triton)", "FusedAdamS exact + clip (triton)", "AdamW f")
VIRTUAL = "virtual"  # how the name of tests/virtual_gpu's device begins
WALL_CLOCK_REPEATS = 7


@dataclass
class Result:
    """Holds what a section has found. `problem` is what went wrong, None if nothing did. `rows` are for CSV files."""

    text: str
    problem: str | None = None
    outcome: str = "ok"
    rows: dict[str, list[Row]] = field(default_factory=dict)


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
    rows: list[Row] = []
    for row in gpu_modes.compiled_kernels():
        rows.append(row)
        text = (
            f"{len(rows)} of {len(gpu_modes.kernels_of_modes())} kernels as the modes have them compiled; none is "
            "launched here. Registers and spills are those of a thread, as the driver states them.\n\n"
        )
        yield Result(text + markdown_table(list(row), [[str(cell) for cell in row.values()] for row in rows]))


def mode_section(name: str, device: str = "cuda", backend: str = "triton") -> Iterator[Result]:
    """Checks one mode. The largest difference is a multiple of what is allowed."""
    (mode,) = (mode for mode in gpu_modes.MODES if mode.name == name)
    far = gpu_modes.difference(mode, device, backend)
    outcome = f"{far:.2g} of the difference allowed"
    yield Result("", None if far <= 1 else f"differs: {outcome}", f"agrees, {outcome}")


def step_times_section(name: str, suite: Suite) -> Iterator[Result]:
    among = [c for c in (*GPU_CONTENDERS.values(), *gpu_peers()) if c.backend not in ("torch", "loop")]
    contenders, errors = usable(taking_part(among, suite.shapes))
    case = step_time.case_of(name, suite, contenders, "cuda")
    rows, on_the_wall = measure(case), []

    def result() -> Result:
        text = "\n\n".join([step_times_text(rows, on_the_wall), *left_out(errors)])
        return Result(text, raising(errors), rows={"step_time.csv": rows})

    yield result()  # the wall clock might hang, so the device's times are kept first
    on_the_wall = measure(replace(case, timer=gpu.wall_timed, repeats=min(suite.repeats, WALL_CLOCK_REPEATS)))
    yield result()


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


def step_times_text(rows: Sequence[Row], on_the_wall: Sequence[Row]) -> str:
    first, wall = rows[0], {row["contender"]: milliseconds(row["median_s"]) for row in on_the_wall}
    others = first["other_load"]
    load = "" if others is None else f"Other processes used {others:.1f} cores of the CPU meanwhile."
    return (
        f"{first['elements']:,} elements in {first['tensors']:,} tensors of {first['dtype']}, {first['repeats']} "
        "repeats. All take turns; the ratio of medians is to AdamW fused, with torch's functions for clipping and "
        "averages where these are asked for. The device's time is without the host's work. By the wall clock it is a "
        f"step of {gpu.STEPS_IN_A_ROW} in a row: the host's work or the device's, whichever takes longer. {load}\n\n"
        + times_table(rows, {"wall clock ms": lambda row: wall.get(row["contender"], "")})
    )


def peak_section(elements: int, repeats: int) -> Iterator[Result]:
    modes = {mode.name: mode for mode in gpu_modes.MODES if mode.is_measured}
    steps = {name: attempted(partial(gpu_modes.step_of, mode, elements)) for name, mode in modes.items()}
    errors = {name: step for name, step in steps.items() if isinstance(step, Exception)}
    if not steps.keys() - errors.keys():
        raise next(iter(errors.values()))
    peak = gpu.peak_here()
    case = Case(
        "modes",
        {"elements": elements},
        {name: (lambda _, step=step: step) for name, step in steps.items() if name not in errors},
        repeats,
        timer=gpu.timed,
        more=speeds({name: mode.bytes_per_element for name, mode in modes.items()}, elements, peak),
        device=torch.cuda.get_device_name(),
    )
    rows = measure(case)
    known = "not known for this device" if peak is None else f"{peak:,.0f} GB/s"
    text = (
        f"One matrix of {elements:,} elements, {repeats} repeats, which take turns. Peak: {known}. The ratio is to the "
        "first row. Bytes for each element are those that docs/notes/gpu.md has, counted in an emulator.\n\n"
    )
    table = times_table(rows, {"bytes": lambda row: f"{row['bytes_per_element']:g}"})
    yield Result("\n\n".join([text + table, *left_out(errors)]), raising(errors), rows={"modes.csv": rows})


def times_table(rows: Sequence[Row], more: Mapping[str, Callable[[Row], str]]) -> str:
    cells = [
        [
            row["contender"],
            milliseconds(row["median_s"]),
            f"{milliseconds(row['q1_s'])} - {milliseconds(row['q3_s'])}",
            *(text(row) for text in more.values()),
            f"{row['ratio']:.2f}",
            "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}",
            "" if row["share_of_peak"] is None else f"{row['share_of_peak']:.0%}",
        ]
        for row in rows
    ]
    headings = ["", "device's median ms", "quartiles ms", *more, "ratio", "GB/s", "of peak"]
    return markdown_table(headings, cells)


def launches_section(shapes: Sequence[tuple[int, ...]]) -> Iterator[Result]:
    rows, errors = [], {}
    for name, contender in GPU_CONTENDERS.items():
        if not name.startswith(COUNTED) or contender.clips_before or "outliers" in name:
            continue
        counts = attempted(lambda c=contender: gpu.counted(c.build(parameters(shapes, device="cuda"))))
        if isinstance(counts, Exception):
            errors[name] = counts
        else:
            rows.append([name, *launches_cells(counts)])
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


def traceback_block(error: BaseException) -> str:
    return f"```text\n{''.join(traceback.format_exception(error)).rstrip()}\n```"
