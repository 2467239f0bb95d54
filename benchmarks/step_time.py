"""Time of an optimizer's step, by suite of shapes and by contender.

Within a suite all contenders take turns, so that a machine whose speed wanders treats them alike. On a GPU times are
the device's, with the host ahead of it.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import gpu
from benchmarks.arguments import positive
from benchmarks.conditions import conditions, write_rows
from benchmarks.contenders import CONTENDERS, GPU_CONTENDERS, Contender, parameters, selected, taking_part
from benchmarks.other_load import OtherLoad, warn_of_other_load
from benchmarks.plot_step_time import plot
from benchmarks.suites import SUITES, Suite
from benchmarks.timing import WARM_UP_ROUNDS, Quartiles, interleaved_times, milliseconds, timed

Row = dict[str, Any]


def measure(
    name: str,
    suite: Suite,
    contenders: Sequence[Contender],
    repeats: int,
    progress: Progress,
    device: str = "cpu",
) -> list[Row]:
    params = parameters(suite.shapes, device=device)
    steps = [contender.build(params) for contender in contenders]
    task = progress.add_task(name, total=repeats + WARM_UP_ROUNDS)
    other_load = OtherLoad()
    timer = timed if device == "cpu" else gpu.timed
    times = interleaved_times(steps, repeats, on_round=lambda: progress.advance(task), timer=timer)
    seconds = {contender.name: Quartiles.of(values) for contender, values in zip(contenders, times, strict=True)}
    shared = conditions(other_load, device if device == "cpu" else torch.cuda.get_device_name())
    peak = None if device == "cpu" else gpu.peak_here()
    return [
        {
            "suite": name,
            "contender": contender.name,
            "backend": contender.backend,
            "elements": suite.elements,
            "tensors": len(params),
            "dtype": str(params[0].dtype).removeprefix("torch."),
            "repeats": repeats,
            "median_s": seconds[contender.name].median,
            "q1_s": seconds[contender.name].q1,
            "q3_s": seconds[contender.name].q3,
            "bytes_per_element": contender.bytes_per_element,
            "gb_per_s": (speed := gb_per_s(contender, suite.elements, seconds[contender.name].median)),
            "peak_gb_per_s": peak,
            "share_of_peak": None if speed is None or peak is None else speed / peak,
            "ratio": seconds[contender.name].median / seconds[contender.peer].median,
            "peer": contender.peer,
            **shared,
        }
        for contender in contenders
    ]


def gb_per_s(contender: Contender, elements: int, seconds: float) -> float | None:
    bytes_per_element = contender.bytes_per_element
    return None if bytes_per_element is None else bytes_per_element * elements / seconds / 1e9


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = (
        f"{first['suite']}: {first['elements']:,} elements in {first['tensors']:,} tensors, {first['repeats']} repeats"
    )
    if first["peak_gb_per_s"] is not None:
        title += f", peak {first['peak_gb_per_s']:,.0f} GB/s"
    caption = "ratio: to AdamW fused, or with clipping to AdamW fused + clip_grad_norm_"
    result = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    result.add_column("contender", no_wrap=True)
    headings = ["median ms", "quartiles ms", "GB/s", "ratio"]
    if first["peak_gb_per_s"] is not None:
        headings.insert(3, "of peak")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        median, q1, q3 = (milliseconds(row[key]) for key in ("median_s", "q1_s", "q3_s"))
        speed = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}"
        cells = [str(row["contender"]), median, f"{q1} - {q3}", speed, f"{row['ratio']:.2f}"]
        if row["peak_gb_per_s"] is not None:
            cells.insert(4, "" if row["share_of_peak"] is None else f"{row['share_of_peak']:.0%}")
        result.add_row(*cells)
    return result


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help='default: cpu; "cuda" is ROCm too')
    result.add_argument("--suite", action="append", choices=list(SUITES), help="repeatable; default: all")
    result.add_argument(
        "--contender",
        action="append",
        metavar="TEXT",
        help="those with TEXT in their name, and their peers; repeatable",
    )
    result.add_argument("--repeats", type=positive, help="default: by suite, about 5 minutes for all on two slow cores")
    result.add_argument("--threads", type=positive, default=2, help="default: %(default)s")
    result.add_argument(
        "--out", type=Path, metavar="DIR", help="default: results/step_time, with --device cuda results/step_time_cuda"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    on_gpu = options.device != "cpu"
    if on_gpu and (missing := gpu.missing()):
        command.error(f"--device {options.device}: {missing}")
    try:
        contenders = selected(options.contender, GPU_CONTENDERS if on_gpu else CONTENDERS)
    except ValueError as error:
        command.error(str(error))
    torch.set_num_threads(options.threads)

    console = Console()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name in options.suite or SUITES:
            suite = SUITES[name]
            repeats, own = options.repeats or suite.repeats, taking_part(contenders, suite.shapes)
            suite_rows = measure(name, suite, own, repeats, progress, options.device)
            progress.console.print(table(suite_rows))
            warn_of_other_load(console, suite_rows[0]["other_load"])
            rows += suite_rows
            gc.collect()  # optimizers are in reference cycles, and the next suite needs their memory

    out = options.out or Path("results/step_time_cuda" if on_gpu else "results/step_time")
    csv_path = out / "step_time.csv"
    write_rows(csv_path, rows)
    picture_path = plot(csv_path)
    console.print(f"Wrote {csv_path} and {picture_path}", soft_wrap=True)


if __name__ == "__main__":
    main()
