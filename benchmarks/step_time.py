"""Time of an optimizer's step, by suite of shapes and by contender.

Within a suite all contenders take turns. On a GPU times are the device's, with the host ahead of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.table import Table

from benchmarks import gpu
from benchmarks.conditions import positive
from benchmarks.step_times.contenders import CONTENDERS, GPU_CONTENDERS, Contender, parameters, selected, taking_part
from benchmarks.step_times.harness import (
    Case,
    Quartiles,
    Row,
    Step,
    carry_out,
    command,
    grouped,
    timed,
    times_table,
)
from benchmarks.step_times.pictures import plot_step_time
from benchmarks.step_times.suites import SUITES, Suite

CAPTION = "ratio: to AdamW fused, or with clipping to AdamW fused + clip_grad_norm_"


def case_of(name: str, suite: Suite, contenders: Sequence[Contender], repeats: int, device: str = "cpu") -> Case:
    by_name = {contender.name: contender for contender in contenders}
    on_gpu = device != "cpu"
    peak = gpu.peak_here() if on_gpu else None

    def build() -> dict[str, Step]:
        params = parameters(suite.shapes, device=device)
        return {contender.name: contender.build(params) for contender in contenders}

    def speeds(contender: str, times: Mapping[str, list[float]]) -> Row:
        bytes_each = by_name[contender].bytes_per_element
        seconds = Quartiles.of(times[contender]).median
        speed = None if bytes_each is None else bytes_each * suite.elements / seconds / 1e9
        return {
            "backend": by_name[contender].backend,
            "bytes_per_element": bytes_each,
            "gb_per_s": speed,
            "peak_gb_per_s": peak,
            "share_of_peak": None if speed is None or peak is None else speed / peak,
        }

    columns = {"suite": name, "elements": suite.elements, "tensors": len(suite.shapes), "dtype": "float32"}
    return Case(
        name,
        columns,
        build,
        repeats,
        peers={contender.name: contender.peer for contender in contenders},
        timer=gpu.timed if on_gpu else timed,
        more=speeds,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("step_time", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help='default: cpu; "cuda" is ROCm too')
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="repeatable; default: all")
    parser.add_argument(
        "--contender", action="append", metavar="TEXT", help="with TEXT in its name, and its peer; repeatable"
    )
    parser.add_argument("--repeats", type=positive, help="default: by suite, about 5 minutes for all on two slow cores")
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    if on_gpu and (missing := gpu.missing()):
        parser.error(f"--device {options.device}: {missing}")
    try:
        contenders = selected(options.contender, GPU_CONTENDERS if on_gpu else CONTENDERS)
    except ValueError as error:
        parser.error(str(error))
    cases = [
        case_of(name, suite, taking_part(contenders, suite.shapes), options.repeats or suite.repeats, options.device)
        for name, suite in SUITES.items()
        if name in (options.suite or SUITES)
    ]
    out = Path("results/step_time_cuda") if on_gpu and options.out == parser.get_default("out") else options.out

    def tables(rows: Sequence[Row]) -> list[Table]:
        more = {"GB/s": "gb_per_s"} | ({"of peak": "share_of_peak"} if on_gpu else {})
        return [times_table(own, title(own[0]), CAPTION, more) for own in grouped(rows, "suite")]

    carry_out("step_time", cases, out, tables, plot_step_time, options.threads)


def title(row: Row) -> str:
    elements = f"{row['elements']:,} elements in {row['tensors']:,} tensors"
    peak = "" if row["peak_gb_per_s"] is None else f", peak {row['peak_gb_per_s']:,.0f} GB/s"
    return f"{row['suite']}: {elements}, {row['repeats']} repeats{peak}"


if __name__ == "__main__":
    main()
