"""The sections of the report about a GPU. Each prints Markdown as it finds it, and raises where something is wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import gpu, gpu_modes, step_time
from benchmarks.conditions import commit, read_rows, write_rows
from benchmarks.step_times.contenders import GPU_CONTENDERS, Contender, gpu_peers, parameters, speeds, taking_part
from benchmarks.step_times.harness import Case, Row, measure, milliseconds
from benchmarks.step_times.suites import QUICK_SUITES, SUITES, Suite, gpt2_shapes
from swd_fused.__main__ import versions_and_devices

T = TypeVar("T")

PEERS = ("apex", "bitsandbytes", "flashoptim", "torchao")
COUNTED = ("FusedAdamS exact (triton)", "FusedAdamS lagged (triton)", "FusedAdamS exact + clip (triton)", "AdamW f")
VIRTUAL = "virtual"  # how the name of tests/virtual_gpu's device begins
WALL_CLOCK_REPEATS, MOST_REPEATS = 7, 31


def say(text: str) -> None:
    """Flushes: the process may end at any time."""
    print(f"{text}\n", flush=True)


def environment() -> None:
    installed = [each for package in PEERS for each in distributions(name=package)]
    peers = ", ".join(f"{each.name} {each.version}" for each in installed) or "none"
    free, total = torch.cuda.mem_get_info()
    memory = f"memory    {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    source = f"commit    {commit() or 'not known: no git clone'}\ndriver    {gpu.driver_version()}"
    lines = [*versions_and_devices(), source, memory, f"peers     {peers}"]
    if torch.cuda.get_device_name().startswith(VIRTUAL):
        say(
            "**This is the virtual GPU of tests/virtual_gpu: nothing ran on hardware, and no time or rate means "
            "anything. Its profiler shows Triton's kernels alone.**"
        )
    say(f"```text\n{chr(10).join(lines)}\n```")


def mode(name: str, device: str = "cuda", backend: str = "triton") -> None:
    """Checks one mode. The largest difference is a multiple of what is allowed."""
    (chosen,) = (mode for mode in gpu_modes.MODES if mode.name == name)
    far = gpu_modes.difference(chosen, device, backend)
    if not far <= 1:
        raise AssertionError(f"differs: {far:.2g} of the difference allowed")
    say(f"agrees, {far:.2g} of the difference allowed")


def step_times(name: str, is_quick: bool, out: str) -> None:
    suite = (QUICK_SUITES if is_quick else SUITES)[name]
    suite = Suite(suite.shapes, min(suite.repeats, MOST_REPEATS))
    among = [c for c in (*GPU_CONTENDERS.values(), *gpu_peers()) if c.backend not in ("torch", "loop")]
    contenders, errors = usable(taking_part(among, suite.shapes))
    case = step_time.case_of(name, suite, contenders, "cuda")
    rows = kept(Path(out, "step_time.csv"), case)
    say(
        f"{suite.elements:,} elements in {len(suite.shapes):,} tensors of float32, {suite.repeats} repeats. All take "
        "turns; the ratio of medians is to AdamW fused, with torch's functions for clipping and averages where these "
        "are asked for. The device's time is without the host's work."
    )
    say(times_table(rows))
    # The wall clock might hang, so the device's times come first.
    on_the_wall = measure(replace(case, timer=gpu.wall_timed, repeats=min(suite.repeats, WALL_CLOCK_REPEATS)))
    say(
        f"By the wall clock, a step of {gpu.STEPS_IN_A_ROW} in a row: the host's work or the device's, whichever takes "
        f"longer. Other processes used {rows[0]['other_load'] or 0.0:.1f} cores of the CPU."
    )
    cells = [[row["contender"], milliseconds(row["median_s"]), f"{row['ratio']:.2f}"] for row in on_the_wall]
    say(markdown_table(["", "median ms", "ratio"], cells))
    report_errors(errors)


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


def peak(is_quick: bool, out: str) -> None:
    elements, repeats = (5120, 2) if is_quick else (64 * 2**20, MOST_REPEATS)
    modes = {mode.name: mode for mode in gpu_modes.MODES if mode.is_measured}
    steps = {name: attempted(partial(gpu_modes.step_of, mode, elements)) for name, mode in modes.items()}
    errors = {name: step for name, step in steps.items() if isinstance(step, Exception)}
    at_most = gpu.peak_here()
    case = Case(
        "modes",
        {"elements": elements},
        {name: (lambda _, step=step: step) for name, step in steps.items() if name not in errors},
        repeats,
        timer=gpu.timed,
        more=speeds({name: mode.bytes_per_element for name, mode in modes.items()}, elements, at_most),
        device=torch.cuda.get_device_name(),
    )
    known = "not known for this device" if at_most is None else f"{at_most:,.0f} GB/s"
    say(
        f"One matrix of {elements:,} elements, {repeats} repeats, which take turns. Peak: {known}. The ratio is to the "
        "first row. Bytes for each element are those that docs/notes/gpu.md has, counted in an emulator."
    )
    if case.contenders:
        say(times_table(kept(Path(out, "modes.csv"), case)))
    report_errors(errors)


def launches(is_quick: bool) -> None:
    shapes = QUICK_SUITES["gpt2-124m"].shapes if is_quick else tuple(gpt2_shapes(12, 64, 1000, 64))
    rows: list[list[str]] = []
    errors: dict[str, Exception] = {}
    for name, contender in GPU_CONTENDERS.items():
        if not name.startswith(COUNTED) or contender.clips_before or "outliers" in name:
            continue
        counts = attempted(lambda c=contender: gpu.counted(c.build(parameters(shapes, device="cuda"))))
        if isinstance(counts, Exception):
            errors[name] = counts
            continue
        # A step without a kernel is none: then the profiler has not seen it.
        seen = [str(counts[kind]) if counts["kernels"] else "not seen" for kind in ("kernels", "copies")]
        rows.append([name, *seen, str(counts["waits"])])
    say(
        f"A steady step of {len(shapes)} tensors, by torch.profiler; waits are those that it or torch's debug mode "
        "saw, whichever are more. One kernel of ours does the step, a few of torch's count clipped steps. Where it "
        "saw no kernel at all, as without CUPTI or its permissions, nothing is known of copies either."
    )
    say(markdown_table(["optimizer", "kernels", "copies", "waits of the host"], rows))
    report_errors(errors)


def attempted(run: Callable[[], T]) -> T | Exception:
    try:
        return run()
    except Exception as error:
        return error


def report_errors(errors: Mapping[str, Exception]) -> None:
    """Raises if there are any."""
    for name, error in errors.items():
        say(f"{name} is left out:\n\n```text\n{''.join(traceback.format_exception(error)).rstrip()}\n```")
    if errors:
        raise RuntimeError(f"these raise: {', '.join(errors)}")


def kept(path: Path, case: Case) -> list[Row]:
    """Measures a case and adds its rows to a file."""
    rows = measure(case)
    write_rows(path, [*(read_rows(path) if path.exists() else []), *rows])
    return rows


def times_table(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        middle, q1, q3 = (milliseconds(row[key]) for key in ("median_s", "q1_s", "q3_s"))
        speed = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}"
        share = "" if row["share_of_peak"] is None else f"{row['share_of_peak']:.0%}"
        cells.append([row["contender"], middle, f"{q1} - {q3}", f"{row['ratio']:.2f}", speed, share])
    return markdown_table(["", "device's median ms", "quartiles ms", "ratio", "GB/s", "of peak"], cells)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
