"""Looks for cliffs: layouts, shapes and values with which a step takes much longer than a plain one.

A plain step is that of one contiguous float32 matrix with rows of 1024 elements, or of another dtype and state. Each
case differs from it in one thing: how parameters or gradients lie in memory, their shape, or the gradients' values.
Its time is relative to the plain step of its own dtype and state, on as many elements, with which it takes turns. How
the states themselves compare says the first row, relative to AdamW fused in float32.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import positive
from benchmarks.cliff_cases import CASES, PLAIN, STATES, Case, Source, State, cells
from benchmarks.conditions import conditions, write_rows
from benchmarks.contenders import PEER, Step, adamw
from benchmarks.other_load import OtherLoad, warn_of_other_load
from benchmarks.plot_cliffs import CLIFF, plot
from benchmarks.timing import WARM_UP_ROUNDS, Quartiles, interleaved_order, timed

Row = dict[str, Any]

UNITS = 10  # 4,055,040 elements
QUICK = 1, 3  # units and repeats
LEAST_REPEATS = 3
TABLE_WIDTH = 130  # where the output is no terminal, which has 80 columns then


def alternating_times(steps: Sequence[Step], repeats: int, budget: float) -> list[list[float]]:
    """Returns the seconds that each step took, in up to `repeats` rounds: fewer, but `LEAST_REPEATS`, where they take
    longer than `budget` seconds."""
    times: list[list[float]] = [[] for _ in steps]
    start = perf_counter()
    for repetition in range(-WARM_UP_ROUNDS, repeats):
        if repetition >= LEAST_REPEATS and perf_counter() - start > budget:
            break
        for index in interleaved_order(range(len(steps)), repetition):
            seconds = timed(steps[index])
            if repetition >= 0:
                times[index].append(seconds)
    return times


def measure(
    state: State,
    cases: Sequence[Case],
    schedule: str,
    units: int,
    repeats: int,
    budget: float,
    on_cell: Callable[[], object],
) -> list[Row]:
    """Returns a row for the plain step, compared with AdamW's, and one for each case, compared with the plain step."""
    other_load = OtherLoad()
    rows: list[Row] = []
    source = Source(state.dtype, units)
    plain_params = PLAIN.make(source)
    plain_step = state.build(plain_params, schedule)

    def add(case: Case, params: Sequence[Tensor], seconds: list[float], peer: str, peer_seconds: list[float]) -> None:
        quartiles, median = Quartiles.of(seconds), Quartiles.of(peer_seconds).median
        shapes = {"x".join(map(str, param.shape)) for param in params}
        rows.append(
            {
                "factor": case.factor,
                "case": case.name,
                "state": state.name,
                "dtype": str(state.dtype).removeprefix("torch."),
                "schedule": schedule,
                "elements": sum(param.numel() for param in params),
                "tensors": len(params),
                "shape": " ".join(shapes),
                "repeats": len(seconds),
                "median_s": quartiles.median,
                "q1_s": quartiles.q1,
                "q3_s": quartiles.q3,
                "ratio": quartiles.median / median,
                "peer": peer,
                "peer_median_s": median,
                "bytes_per_element": state.bytes_per_element(schedule),
            }
        )
        on_cell()

    adamw_step = adamw(PLAIN.make(Source(torch.float32, units)))
    own, other = alternating_times([plain_step, adamw_step], repeats, budget)
    add(PLAIN, plain_params, own, f"{PEER}, float32", other)
    del adamw_step
    for case in cases:
        gc.collect()  # optimizers are in reference cycles, and the next case should find the same free memory
        params = case.make(source)
        own, other = alternating_times([state.build(params, schedule), plain_step], repeats, budget)
        add(case, params, own, "plain", other)
    shared = conditions(other_load)
    return [{**row, **shared} for row in rows]


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    result = Table(
        title=f"Steps relative to the plain one, {first['schedule']} schedule, {first['elements']:,} elements",
        caption=f"{PLAIN.name}: relative to {PEER} in float32. Red: above {CLIFF:g}.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    states = list(dict.fromkeys(row["state"] for row in rows))
    result.add_column("case", no_wrap=True)
    for state in states:
        result.add_column(state, justify="right")
    by_cell = {(row["case"], row["state"]): row for row in rows}
    names = [name for name in (PLAIN.name, *(case.name for case in CASES)) if any((name, s) in by_cell for s in states)]
    result.add_row("bytes per element", *(f"{by_cell[PLAIN.name, s]['bytes_per_element']:.4g}" for s in states))
    result.add_row("plain step, ms", *(f"{1e3 * by_cell[PLAIN.name, s]['median_s']:.2f}" for s in states))
    factor = ""
    for name in names:
        here = [by_cell.get((name, state)) for state in states]
        own = next(row["factor"] for row in here if row)
        if own != factor:
            result.add_section()
            factor = own
        result.add_row(name, *(cell(row["ratio"]) if row else "" for row in here))
    return result


def cell(ratio: float) -> str:
    text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"
    return f"[bold red]{text}" if ratio > CLIFF else text


def containing(texts: Sequence[str] | None, names: Sequence[str]) -> set[str]:
    return {name for name in names if not texts or any(text in name for text in texts)}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.cliffs", description=__doc__)
    result.add_argument("--schedule", choices=("exact", "lagged"), default="exact", help="default: %(default)s")
    result.add_argument(
        "--state", action="append", metavar="TEXT", help="those with TEXT in their name; repeatable; default: all"
    )
    result.add_argument(
        "--case", action="append", metavar="TEXT", help="those with TEXT in their name; repeatable; default: all"
    )
    result.add_argument("--repeats", type=positive, default=9, help="default: %(default)s")
    result.add_argument(
        "--budget", type=float, default=0.8, metavar="SECONDS", help="for the repeats of one cell; default: %(default)s"
    )
    result.add_argument("--quick", action="store_true", help="small tensors and few repeats: does everything run?")
    result.add_argument("--threads", type=positive, help="default: as many as torch takes")
    result.add_argument("--out", type=Path, default=Path("results/cliffs"), metavar="DIR", help="default: %(default)s")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    states = containing(options.state, [state.name for state in STATES])
    names = containing(options.case, [case.name for case in CASES])
    if not states or not names:
        command.error(f"no such state or case: {'; '.join(item.name for item in (*STATES, *CASES))}")
    if options.threads:
        torch.set_num_threads(options.threads)
    units, repeats = QUICK if options.quick else (UNITS, options.repeats)
    chosen = [(state, case) for state, case in cells() if state.name in states and case.name in names]

    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen) + len(states))
        for state in (state for state in STATES if state.name in states):
            progress.update(task, description=state.name)
            cases = [case for of_state, case in chosen if of_state is state]
            rows += measure(
                state, cases, options.schedule, units, repeats, options.budget, lambda: progress.advance(task)
            )
    console.print(table(rows))
    loads = [row["other_load"] for row in rows if row["other_load"] is not None]
    warn_of_other_load(console, max(loads, default=None))
    csv_path = options.out / "cliffs.csv"
    write_rows(csv_path, rows)
    console.print(f"Wrote {csv_path} and {plot(csv_path)}", soft_wrap=True)


if __name__ == "__main__":
    main()
