"""A report about FusedAdamS on a CUDA or ROCm GPU, in one Markdown file to attach to an issue.

Checks each mode against plain PyTorch, measures steps beside AdamW's and other packages', compares with the memory's
peak rate, and counts launches and waits. What fails is in the report, and does not stop it.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import gpu_launches, gpu_modes, step_time
from benchmarks.conditions import write_rows
from benchmarks.contenders import GPU_CONTENDERS, Contender, gpu_peers, parameters, taking_part
from benchmarks.plot_step_time import plot
from benchmarks.suites import SUITES, Suite, gpt2_shapes
from benchmarks.timing import milliseconds
from swd_fused.__main__ import devices, version_of, versions

Row = dict[str, Any]
T = TypeVar("T")

PEERS = ("apex", "bitsandbytes", "flashoptim", "torchao")
MOST_REPEATS = 31
MEASURED_SUITES = ("one-64M", "gpt2-124m", "one-1M", "1000x500")
COUNTED_SHAPES = tuple(gpt2_shapes(layers=12, width=64, vocabulary=1000, context=64))
# Likenesses of the suites, to run everything and to time nothing: an emulated GPU takes minutes for them.
QUICK_SUITES = {
    "one-64M": Suite(((64, 256),), repeats=2),
    "gpt2-124m": Suite(tuple(gpt2_shapes(layers=3, width=16, vocabulary=512, context=16)), repeats=2),
    "one-1M": Suite(((1000,),), repeats=2),
    "1000x500": Suite(((5,),) * 200, repeats=2),
}
QUICK_COUNTED_SHAPES = QUICK_SUITES["gpt2-124m"].shapes
COUNTED = ("FusedAdamS exact (triton)", "FusedAdamS lagged (triton)", "FusedAdamS exact + clip (triton)", "AdamW f")
ISSUE = "https://github.com/swd-fused/swd_fused/issues/new?template=gpu_report.yml"
VIRTUAL = "virtual"  # how the name of tests/virtual_gpu's device begins


@dataclass
class Result:
    """Holds what a section has found. `problem` is what went wrong, None if nothing did."""

    text: str
    problem: str | None = None
    step_rows: list[Row] = field(default_factory=list)
    mode_rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Section:
    title: str
    run: Callable[[], Result]


# --- The sections


def modes_section(modes: Sequence[gpu_modes.Mode] = gpu_modes.MODES, **where: str) -> Result:
    """Checks each mode by itself: one that raises does not keep the others from being checked."""
    rows, failed, tracebacks = [], [], []
    for mode in modes:
        far = attempted(partial(gpu_modes.difference, mode, **where))
        if isinstance(far, Exception):
            rows.append([mode.name, f"**RAISES** {type(far).__name__}", ""])
            tracebacks.append(f"{mode.name}:\n\n{traceback_block(far)}")
        else:
            rows.append([mode.name, "agrees" if far <= 1 else "**DIFFERS**", f"{far:.2g}"])
        if isinstance(far, Exception) or not far <= 1:
            failed.append(mode.name)
    text = (
        f"{gpu_modes.STEPS} steps beside the torch backend on the CPU: parameters, state and logged values. The number "
        "is the largest difference as a multiple of what is allowed.\n\n"
        + markdown_table(["mode", "outcome", "difference / allowed"], rows)
    )
    problem = f"differ or raise: {', '.join(failed)}" if failed else None
    return Result("\n\n".join([text, *tracebacks]), problem)


def step_times_section(name: str, suite: Suite, repeats: int, progress: Progress) -> Result:
    among = [c for c in (*GPU_CONTENDERS, *gpu_peers()) if c.backend not in ("torch", "loop")]
    contenders, errors = usable(taking_part(among, suite.shapes))
    rows = step_time.measure(name, suite, contenders, repeats, progress, "cuda")
    return Result("\n\n".join([step_times_text(rows), *left_out(errors)]), raising(errors), step_rows=rows)


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


def step_times_text(rows: Sequence[Row]) -> str:
    first = rows[0]
    cells = [
        [
            row["contender"],
            milliseconds(row["median_s"]),
            f"{milliseconds(row['q1_s'])} - {milliseconds(row['q3_s'])}",
            f"{row['ratio']:.2f}",
            "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}",
            share_text(row["share_of_peak"]),
        ]
        for row in rows
    ]
    others = first["other_load"]
    load = "" if others is None else f"Other processes used {others:.1f} cores of the CPU meanwhile."
    headings = ["optimizer", "median ms", "quartiles ms", "ratio", "GB/s", "of peak"]
    return (
        f"{first['elements']:,} elements in {first['tensors']:,} tensors of {first['dtype']}, {first['repeats']} "
        "repeats. All take turns; the ratio of medians is to AdamW fused, with clipping to AdamW fused + "
        f"clip_grad_norm_. {load}\n\n" + markdown_table(headings, cells)
    )


def peak_section(elements: int, repeats: int) -> Result:
    steps = {m: attempted(partial(gpu_modes.step_of, m, elements)) for m in gpu_modes.MODES if m.is_measured}
    errors = {mode.name: step for mode, step in steps.items() if isinstance(step, Exception)}
    working = {mode: step for mode, step in steps.items() if not isinstance(step, Exception)}
    if not working:
        raise next(iter(errors.values()))
    rows = gpu_modes.measured(working, elements, repeats)
    return Result("\n\n".join([peak_text(rows), *left_out(errors)]), raising(errors), mode_rows=rows)


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
        "Bytes for each element are those that docs/gpu.md has, counted in an emulator.\n\n"
        + markdown_table(["mode", "bytes", "median ms", "GB/s", "of peak"], cells)
    )


def launches_section(shapes: Sequence[tuple[int, ...]]) -> Result:
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
    return Result("\n\n".join([text + table, *left_out(errors)]), raising(errors))


def launches_cells(counts: dict[str, int]) -> list[str]:
    """A step without a kernel is none: then the profiler has not seen it."""
    seen = [str(counts[kind]) if counts["kernels"] else "not seen" for kind in ("kernels", "copies")]
    return [*seen, str(counts["waits"])]


# --- The report


def attempted(run: Callable[[], T]) -> T | Exception:
    try:
        return run()
    except Exception as error:
        return error


def left_out(errors: dict[str, Exception]) -> list[str]:
    return [f"{name} is left out:\n\n{traceback_block(error)}" for name, error in errors.items()]


def raising(errors: dict[str, Exception]) -> str | None:
    return f"raise: {', '.join(errors)}" if errors else None


def ran(section: Section) -> Result:
    start = perf_counter()
    result = attempted(section.run)
    if isinstance(result, Exception):
        problem = f"{type(result).__name__}: {result}".splitlines()[0]
        result = Result(f"This section failed.\n\n{traceback_block(result)}", problem)
    result.seconds = perf_counter() - start
    return result


def report_of(environment: str, results: dict[str, Result], is_virtual: bool, is_quick: bool) -> str:
    parts = ["# GPU report of swd_fused"]
    if is_virtual:
        parts.append(
            "**This is the virtual GPU of tests/virtual_gpu: nothing ran on hardware, and no time or rate means "
            "anything. Its profiler shows Triton's kernels alone.**"
        )
    if is_quick:
        parts.append("Run with --quick: tensors are so small that times say little, whatever their suites' names say.")
    outcomes = [
        [title, "ok" if result.problem is None else f"**problem**: {result.problem}", f"{result.seconds:.0f}"]
        for title, result in results.items()
    ]
    parts += [f"```text\n{environment}\n```", markdown_table(["section", "outcome", "seconds"], outcomes)]
    for title, result in results.items():
        parts += [f"## {title}", result.text]
    return "\n\n".join(parts) + "\n"


def environment_text() -> str:
    peers = ", ".join(f"{package} {version_of(package)}" for package in PEERS)
    free, total = torch.cuda.mem_get_info()
    memory = f"memory    {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return "\n".join([versions(), f"commit    {commit()}", devices(), memory, f"peers     {peers}"])


def commit() -> str:
    """Returns the source's, and whether it was changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = attempted(partial(subprocess.run, command, capture_output=True, text=True, timeout=10, check=True))
    return "not known: no git clone" if isinstance(done, Exception) else done.stdout.strip()


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def share_text(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def traceback_block(error: BaseException) -> str:
    return f"```text\n{''.join(traceback.format_exception(error)).rstrip()}\n```"


def sections(is_quick: bool, progress: Progress) -> list[Section]:
    suites = QUICK_SUITES if is_quick else {name: SUITES[name] for name in MEASURED_SUITES}
    elements, repeats = (5120, 2) if is_quick else (64 * 2**20, MOST_REPEATS)
    counted = QUICK_COUNTED_SHAPES if is_quick else COUNTED_SHAPES

    def timed(name: str, suite: Suite) -> Section:
        times = min(suite.repeats, MOST_REPEATS)
        return Section(f"Step times: {name}", lambda: step_times_section(name, suite, times, progress))

    return [
        Section("Modes against plain PyTorch", modes_section),
        Section("Launches and waits", lambda: launches_section(counted)),
        Section("Share of the memory's peak rate", lambda: peak_section(elements, repeats)),
        *(timed(name, suite) for name, suite in suites.items()),
    ]


def written(out: Path, environment: str, results: dict[str, Result], is_virtual: bool, is_quick: bool) -> list[Path]:
    """Writes the report, and beside it what was measured and a picture of that. Returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "gpu_report.md"]
    step_rows = [row for result in results.values() for row in result.step_rows]
    mode_rows = [row for result in results.values() for row in result.mode_rows]
    for name, rows in (("step_time.csv", step_rows), ("modes.csv", mode_rows)):
        if rows:
            write_rows(out / name, rows)
            paths.append(out / name)
    if step_rows:
        picture = ran(Section("Picture", lambda: Result(str(plot(out / "step_time.csv")))))
        if picture.problem is None:
            paths.append(Path(picture.text))
        else:
            results = {**results, "Picture": picture}
    paths[0].write_text(report_of(environment, results, is_virtual, is_quick))
    return paths


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    result.add_argument("--quick", action="store_true", help="small tensors and few repeats: does everything run?")
    result.add_argument(
        "--out", type=Path, default=Path("results/gpu_report"), metavar="DIR", help="default: %(default)s"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 1 if the report has problems."""
    command = parser()
    options = command.parse_args(arguments)
    if not torch.cuda.is_available():
        command.error(
            f"torch {torch.__version__} finds no CUDA or ROCm GPU here, and the report is about one. Install a torch "
            "for your GPU, or try tests/virtual_gpu/run python -m benchmarks.gpu_report --quick."
        )
    # An illegal access makes all later calls of CUDA raise, so the report must need none at its end.
    is_virtual, environment = torch.cuda.get_device_name().startswith(VIRTUAL), environment_text()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: dict[str, Result] = {}
    with Progress(*columns, console=console, transient=True) as progress:
        plan = sections(options.quick, progress)
        task = progress.add_task("report", total=len(plan))
        for section in plan:
            progress.update(task, description=section.title)
            results[section.title] = result = ran(section)
            outcome = "ok" if result.problem is None else f"problem: {result.problem}"
            progress.console.print(f"{section.title}: {outcome}, {result.seconds:.0f} s", markup=False, soft_wrap=True)
            progress.advance(task)
            gc.collect()  # optimizers are in reference cycles, and the next section needs their memory
            attempted(torch.cuda.empty_cache)
    paths = written(options.out, environment, results, is_virtual, options.quick)
    console.print(f"Wrote {', '.join(map(str, paths))}", soft_wrap=True)
    console.print(f"Please attach them to {ISSUE}", soft_wrap=True)
    return int(any(result.problem is not None for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
