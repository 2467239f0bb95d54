"""Bytes for each parameter of a model: the parameter, its gradient and the optimizer's state, measured after a step.

With --measure the memory of whole training steps, with its peak, for FusedAdamS and its peers; see training_memory.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.conditions import OtherLoad, conditions, positive, write_rows
from benchmarks.training_memory import MALLOC, MODELS, SETTINGS, Row, measured
from swd_fused import FusedAdamS, __version__

NUMEL = 10**6

CHOICES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("float32", torch.float32, {}),
    ("float32, first moment bfloat16", torch.float32, {"state_dtype": torch.bfloat16}),
    ("float32, amsgrad", torch.float32, {"amsgrad": True}),
    ("bfloat16", torch.bfloat16, {}),
    ("bfloat16, stochastic rounding", torch.bfloat16, {"stochastic_rounding": True}),
    ("bfloat16, master weights", torch.bfloat16, {"master_weights": True}),
    (
        "bfloat16, master weights, first moment bfloat16",
        torch.bfloat16,
        {"master_weights": True, "state_dtype": torch.bfloat16},
    ),
    (
        "bfloat16, stochastic rounding, first moment bfloat16",
        torch.bfloat16,
        {"stochastic_rounding": True, "state_dtype": torch.bfloat16},
    ),
    ("float32, 8bit", torch.float32, {"state_dtype": "8bit"}),
    ("bfloat16, stochastic rounding, 8bit", torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "8bit"}),
    ("bfloat16, master weights, 8bit", torch.bfloat16, {"master_weights": True, "state_dtype": "8bit"}),
]


def bytes_per_parameter(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, float]:
    param = torch.nn.Parameter(torch.randn(NUMEL).to(dtype))
    param.grad = torch.randn(NUMEL).to(dtype)
    optimizer = FusedAdamS([param], **options)
    optimizer.step()
    state = sum(tensor.untyped_storage().nbytes() for tensor in optimizer.state[param].values())
    sizes = {"parameter": param.nbytes, "gradient": param.grad.nbytes, "state": state}
    rounded = {name: round(size / NUMEL, 2) for name, size in sizes.items()}
    return {**rounded, "all": round(sum(rounded.values()), 2)}


def measure(model: str, threads: int, texts: Sequence[str], path: Path, console: Console) -> list[Row]:
    """Measures the settings whose names contain one of the texts, or all. Says which could not be measured, and why.

    Writes the rows after each, so that a run that is interrupted has not measured in vain.
    """
    chosen = [setting.name for setting in SETTINGS if not texts or any(text in setting.name for text in texts)]
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(model, total=len(chosen))
        for name in chosen:
            other_load = OtherLoad()
            row = measured(name, model, threads)
            if isinstance(row, str):
                progress.console.print(f"Skipped {name}: {row}", soft_wrap=True, highlight=False)
            else:
                shared = {**conditions(other_load), "threads": threads, "malloc": " ".join(MALLOC)}
                rows.append({"model": model, "setting": name, **row, **shared})
                write_rows(path, rows)
            progress.advance(task)
    return rows


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{first['model']}: bytes for each of {first['elements']:,} parameters"
    caption = (
        "gradients: the most that are alive at once; peak: with activations and temporaries; first step's: also with "
        f"compilers\na step of {first['tokens']} tokens on the CPU, the worst of two after two that warm up, each "
        f"setting in its own process, {first['threads']} threads, freed memory goes back to the system at once, torch "
        f"{first['torch']}"
    )
    result = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    result.add_column("setting")
    for heading in ("parameters", "gradients", "state", "peak", "first step's"):
        result.add_column(heading, justify="right")
    for row in rows:
        sizes = (row[key] for key in ("parameters", "gradients", "state", "peak", "first_step_peak"))
        result.add_row(row["setting"], *(f"{size / row['elements']:.2f}" for size in sizes))
    return result


def draw_measured(path: Path, console: Console) -> None:
    console.print(f"Wrote {path}", soft_wrap=True)
    try:
        from benchmarks.plot_training_memory import plot
    except ImportError as error:
        console.print(f"No picture: {error}. pip install matplotlib", soft_wrap=True)
        return
    console.print(f"Wrote {plot(path)}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="the peak of training steps, on Linux")
    parser.add_argument("--model", choices=list(MODELS), default="gpt-100m", help="for --measure; default: %(default)s")
    parser.add_argument("--setting", action="append", default=[], metavar="TEXT", help="for --measure; repeatable")
    parser.add_argument("--threads", type=positive, default=2, help="for --measure; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("results/memory"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    console = Console()
    if options.measure:
        path = options.out / "training_memory.csv"
        rows = measure(options.model, options.threads, options.setting, path, console)
        if not rows:
            parser.exit(1, "No setting could be measured.\n")
        console.print(table(rows))
        draw_measured(path, console)
        return
    result = Table(title=f"Bytes for each parameter, of {NUMEL:,}", title_justify="left", box=SIMPLE_HEAD)
    result.add_column("choice")  # the only one that may be wrapped, so that no number is cut off
    rows = []
    for name, dtype, choice in CHOICES:
        sizes = bytes_per_parameter(dtype, choice)
        if not rows:
            for heading in sizes:
                result.add_column(heading, justify="right", no_wrap=True)
        result.add_row(name, *(f"{size:g}" for size in sizes.values()))
        rows.append({"choice": name, **sizes, "swd_fused": __version__, "torch": torch.__version__})
    console.print(result)
    path = options.out / "memory.csv"
    write_rows(path, rows)
    console.print(f"Wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
