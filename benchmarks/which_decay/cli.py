"""The command: chooses runs, carries them out, writes CSV files, tables and the picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import write_rows
from benchmarks.paper.data import DataError
from benchmarks.studies import arguments
from benchmarks.studies.rows import Row, read_rows
from benchmarks.studies.runner import Results, Study, command, conditions_of, shortened
from benchmarks.studies.store import Store
from benchmarks.which_decay import exponents, findings
from benchmarks.which_decay.parts import FULL, NAMES, QUICK, Grid, Run, Stairs
from benchmarks.which_decay.plot import plot
from benchmarks.which_decay.tasks import Sources, task_of
from benchmarks.which_decay.training import trained

DESCRIPTION = """\
Which weight decay? AdamW, AdamS, AdamC, corrected AdamS, cautious AdamW and AdamS, and none, all through FusedAdamS.
Losses: a grid of decays for each with seed 0, then other seeds at each one's best. Exponents: how the gradient norm at
equilibrium scales with the learning rate, beside what is predicted. All contenders of a seed start from the same
weights and see the same batches. Decays are in AdamW's terms; AdamS finds its lambda from them in the warm-up.

By default there are three seeds, and for losses one more, which chooses decays. Finished runs are kept, and unfinished
ones are saved once a minute: the same command goes on from there.
"""

PARTS = """\
parts, in this order:
  exponents         a net whose weights all have no scale, noisy digits (needs scikit-learn); about 7 minutes of a core
  gpt               a GPT of a million parameters on prose; 25 minutes
  resnet            a ResNet of 20,000 parameters on CIFAR-10; needs --data; 14 minutes
  resnet-exponents  exponents of that ResNet; needs --data; 15 minutes
"""

Part = Stairs | Grid


def parser() -> argparse.ArgumentParser:
    result = arguments.parser("which_decay", DESCRIPTION, jobs=1, epilog=PARTS)
    result.add_argument("--part", action="append", choices=NAMES, help="repeatable; default: all that have their data")
    prose = "prose, a file or a folder; default: package anarchism"
    result.add_argument("--text", type=Path, metavar="FILE", help=prose)
    result.add_argument("--data", type=Path, metavar="DIR", help="folder with CIFAR-10; nothing is downloaded")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    with command("which_decay") as console:
        parts = QUICK if options.quick else FULL
        if not options.draw:
            carry_out(parts, options, console)
        report(parts, options.out, console)


def carry_out(parts: Sequence[Part], options: argparse.Namespace, console: Console) -> None:
    sources = Sources(options.text, options.data, options.quick)
    chosen: dict[str, tuple[Part, str]] = {}
    for part in parts:
        if options.part and part.name not in options.part:
            continue
        try:
            data = task_of(part.task, sources).data
        except DataError as error:
            if options.part:
                raise
            console.print(f"Without {part.name}: {error}", soft_wrap=True)
            continue
        seeds = options.seeds + isinstance(part, Grid) if options.seeds else part.seeds
        chosen[part.name] = replace(part, seeds=seeds), data

    def planned(results: Results) -> list[Run]:
        return [run for part, data in chosen.values() for run in part.planned(data, results)]

    store = Store(options.out / "runs.jsonl")
    train = partial(trained, sources=sources)
    results = Study("which decay", store, train, planned, workers=options.jobs).carry_out(console)
    for name, kind in (("exponents", Stairs), ("losses", Grid)):
        rows: list[Row] = []
        for part, data in chosen.values():
            for run in part.planned(data, results) if isinstance(part, kind) else ():
                record = results[run.key]
                lines = exponents.stages(run, record) if kind is Stairs else [findings.row_of(run, record)]
                rows += [{**shortened(line), **conditions_of(record)} for line in lines]
        if rows:
            write_rows(options.out / f"which_decay_{name}.csv", rows)


def report(parts: Sequence[Part], out: Path, console: Console) -> None:
    """From the CSV files that there are."""
    paths = {name: out / f"which_decay_{name}.csv" for name in ("losses", "exponents")}
    rows = {name: read_rows(path) if path.exists() else [] for name, path in paths.items()}
    if not any(rows.values()):
        raise DataError(f"{out} has neither {paths['losses'].name} nor {paths['exponents'].name}, wanted one of them")
    fixed = [(part.task, part.too_much) for part in parts if isinstance(part, Grid) and part.too_much is not None]
    tables: list[tuple[str, list[str], list[list[str]]]] = []
    for part in parts:
        if isinstance(part, Stairs):
            own = [row for row in rows["exponents"] if row["task"] == part.task]
            title = f"{part.name}: exponents of the learning rate, {part.task}, decay {part.decays[0]:g}"
            tables.append((title, exponents.HEADINGS, exponents.cells(exponents.exponents(own))))
            continue
        for at in [None, *(decay for task, decay in fixed if task == part.task)]:
            where = "the best decay, without the seed that chose it" if at is None else f"a decay of {at:g}"
            found = findings.cells(findings.findings(rows["losses"], part.task, at))
            tables.append((f"{part.name}: losses at {where}, {part.schedule.steps} steps", findings.HEADINGS, found))
    for title, headings, cells in tables:
        if cells:
            table = Table(*headings, title=title, title_justify="left", box=SIMPLE_HEAD)
            for line in cells:
                table.add_row(*line)
            console.print(table)
    picture = plot(rows["losses"], rows["exponents"], out / "which_decay.png", fixed)
    console.print(f"{picture}, from {' and '.join(str(paths[name]) for name in paths if rows[name])}", soft_wrap=True)
