"""The command: chooses runs, carries them out, writes CSV files, tables and the picture."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import positive, write_rows
from benchmarks.paper.data import DataError
from benchmarks.studies.rows import chosen, read_rows
from benchmarks.studies.runner import Results, Study, command, conditions_of, shortened
from benchmarks.studies.store import Store
from benchmarks.which_decay import exponents, losses
from benchmarks.which_decay.parts import FULL, NAMES, QUICK, Grid, Part, Run, Stairs
from benchmarks.which_decay.plot import plot
from benchmarks.which_decay.tasks import Sources, task_of
from benchmarks.which_decay.training import trained

DESCRIPTION = """\
Which weight decay? AdamW, AdamS, AdamC, corrected AdamS, cautious AdamW and AdamS, and none, all through FusedAdamS.
Losses: a grid of decays for each with seed 0, then other seeds at each one's best. Exponents: how the gradient norm at
equilibrium scales with the learning rate, beside what is predicted. All contenders of a seed start from the same
weights and see the same batches. Decays are in AdamW's terms; AdamS finds its lambda from them in the warm-up.

By default there are three seeds, and for losses one more, which chooses decays. Finished runs are kept: the same
command goes on with the first that is missing. `plot` runs nothing, and draws the CSV files again.
"""
PARTS = """\
parts, in this order:
  exponents         a net whose weights all have no scale, noisy digits (needs scikit-learn); about 7 minutes of a core
  gpt               a GPT of a million parameters on prose; 25 minutes
  resnet            a ResNet of 20,000 parameters on CIFAR-10; needs --data; 14 minutes
  resnet-exponents  exponents of that ResNet; needs --data; 15 minutes
"""
RESULTS = Path(__file__).parents[1] / "results" / "which_decay"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.which_decay", None, DESCRIPTION, PARTS, formatter_class=layout
    )
    parser.add_argument("what", choices=("run", "plot"), nargs="?", default="run", help="default: %(default)s")
    parser.add_argument("--part", action="append", choices=NAMES, help="repeatable; default: all that have their data")
    prose = "prose, a file or a folder; default: package anarchism"
    parser.add_argument("--text", type=Path, metavar="FILE", help=prose)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with CIFAR-10; nothing is downloaded")
    parser.add_argument("--seeds", type=positive, help="how many; default: 3")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a few steps of small models, to see that it works")
    out = "default: results/which_decay, for plot this repository's"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    args = parser.parse_args(argv)
    args.out = args.out or (RESULTS if args.what == "plot" else Path("results/which_decay"))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with command("which_decay") as console:
        parts = QUICK if args.quick else FULL
        if args.what == "run":
            carry_out(parts, args, console)
        report(parts, args.out, console)


def carry_out(parts: Sequence[Part], args: argparse.Namespace, console: Console) -> None:
    sources = Sources(args.text, args.data, args.quick)
    wanted: list[tuple[Part, str]] = []
    for part in parts:
        if args.part and part.name not in args.part:
            continue
        try:
            data = task_of(part.task, sources).data
        except DataError as error:
            if args.part:
                raise
            console.print(f"Without {part.name}: {error}", soft_wrap=True)
            continue
        seeds = args.seeds + isinstance(part, Grid) if args.seeds else part.seeds
        wanted.append((replace(part, seeds=seeds), data))

    def planned(results: Results) -> list[Run]:
        return [run for part, data in wanted for run in part.planned(data, results)]

    store = Store(args.out / "runs.jsonl")
    results = Study("which decay", store, partial(trained, sources=sources), planned, workers=args.jobs).carry_out(
        console
    )
    for name, kind, rows_of in (("exponents", Stairs, exponents.stages), ("losses", Grid, losses.rows_of)):
        runs = [run for part, data in wanted if isinstance(part, kind) for run in part.planned(data, results)]
        records = [(run, results[run.key]) for run in runs]
        rows = [{**shortened(row), **conditions_of(record)} for run, record in records for row in rows_of(run, record)]
        if rows:
            write_rows(args.out / f"which_decay_{name}.csv", rows)


def report(parts: Sequence[Part], out: Path, console: Console) -> None:
    """From the CSV files that there are."""
    paths = [out / f"which_decay_{name}.csv" for name in ("losses", "exponents")]
    of_grids, of_stairs = (read_rows(path) if path.exists() else [] for path in paths)
    if not of_grids and not of_stairs:
        raise DataError(f"{out} has neither {paths[0].name} nor {paths[1].name}, wanted one of them")
    fixed = [(part.task, part.too_much) for part in parts if isinstance(part, Grid) and part.too_much is not None]
    for part in parts:
        if isinstance(part, Stairs):
            title = f"{part.name}: exponents of the learning rate, {part.task}, decay {part.decay:g}"
            show(console, title, exponents.HEADINGS, exponents.cells(chosen(of_stairs, task=part.task)))
            continue
        for at in [None, *(decay for task, decay in fixed if task == part.task)]:
            where = "the best decay, without the seed that chose it" if at is None else f"a decay of {at:g}"
            title = f"{part.name}: losses at {where}, {part.schedule.steps} steps"
            show(console, title, losses.HEADINGS, losses.cells(losses.findings(of_grids, part.task, at)))
    console.print(f"{plot(of_grids, of_stairs, out / 'which_decay.png', fixed)}", soft_wrap=True)


def show(console: Console, title: str, headings: Sequence[str], cells: Iterable[list[str]]) -> None:
    table = Table(*headings, title=title, title_justify="left", box=SIMPLE_HEAD)
    for line in cells:
        table.add_row(*line)
    if table.row_count:
        console.print(table)
