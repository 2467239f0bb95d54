"""Which weight decay? AdamW, AdamS, AdamC, corrected AdamS, cautious AdamW and AdamS, and none, all through FusedAdamS.

Losses: a grid of decays for each with seed 0, then other seeds at each one's best. Exponents: how the gradient norm at
equilibrium scales with the learning rate, beside what is predicted. All contenders of a seed start from the same
weights and see the same batches. Decays are in AdamW's terms; AdamS finds its lambda from them in the warm-up.

By default there are three seeds, and for losses one more, which chooses decays. Finished runs are kept: the same
command goes on with the first that is missing. `plot` runs nothing, and draws the CSV files again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.conditions import positive, write_rows
from benchmarks.paper.data import DataError
from benchmarks.step_times.harness import table
from benchmarks.studies.rows import read_rows
from benchmarks.studies.runner import Results, Study, command, conditions_of, shortened
from benchmarks.studies.store import Store
from benchmarks.which_decay.parts import FULL, NAMES, QUICK, Grid, Part
from benchmarks.which_decay.plot import plot
from benchmarks.which_decay.runs import Run
from benchmarks.which_decay.tasks import Sources, task_of
from benchmarks.which_decay.training import trained

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
    parser = argparse.ArgumentParser("python -m benchmarks.which_decay", None, __doc__, PARTS, formatter_class=layout)
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
    parts = QUICK if args.quick else FULL
    tables = {name: args.out / f"which_decay_{name}.csv" for name in ("losses", "exponents")}
    with command("which_decay") as console:
        if args.what == "run":
            carry_out(parts, args, tables, console)
        rows = {name: read_rows(path) if path.exists() else [] for name, path in tables.items()}
        if not any(rows.values()):
            raise DataError(f"{args.out} has none of {', '.join(path.name for path in tables.values())}, wanted one")
        for part in parts:
            for title, headings, cells in part.tables(rows[part.file]):
                if cells:
                    console.print(table(title, headings, cells))
        fixed = [(part.task, decay) for part in parts if isinstance(part, Grid) for decay in part.too_much]
        console.print(f"{plot(*rows.values(), args.out / 'which_decay.png', fixed)}", soft_wrap=True)


def carry_out(parts: Sequence[Part], args: argparse.Namespace, tables: dict[str, Path], console: Console) -> None:
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

    store, train = Store(args.out / "runs.jsonl"), partial(trained, sources=sources)
    results = Study("which decay", store, train, planned, workers=args.jobs).carry_out(console)
    for name, path in tables.items():
        runs = [(part, run) for part, data in wanted if part.file == name for run in part.planned(data, results)]
        records = [(row, results[run.key]) for part, run in runs for row in part.rows(run, results[run.key])]
        if records:
            write_rows(path, [{**shortened(row), **conditions_of(record)} for row, record in records])
