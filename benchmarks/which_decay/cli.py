"""The command: chooses runs, carries them out, writes CSV files, tables and pictures."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.conditions import positive, write_rows
from benchmarks.paper.data import DataError
from benchmarks.which_decay.exponents import Stage, exponents, stages
from benchmarks.which_decay.findings import Row, findings, row
from benchmarks.which_decay.parts import FULL, NAMES, QUICK, Grid, Stairs
from benchmarks.which_decay.plot import plot
from benchmarks.which_decay.run import Run, Store
from benchmarks.which_decay.runner import Place, run_all
from benchmarks.which_decay.tables import (
    EXPONENT_HEADINGS,
    LOSS_HEADINGS,
    Cells,
    exponent_cells,
    loss_cells,
    markdown,
    table,
)
from benchmarks.which_decay.tasks import Sources, task_of

DESCRIPTION = """\
Which weight decay? AdamW, AdamS, AdamC, corrected AdamS, cautious AdamW and AdamS, and none, all through FusedAdamS.
Losses: a grid of decays for each, then three seeds at each one's best. Exponents: how the gradient norm at equilibrium
scales with the learning rate, beside what is predicted. All contenders of a seed start from the same weights and see
the same batches. Decays are in AdamW's terms; AdamS finds its lambda from them in the warm-up.

Finished runs are kept, and unfinished ones are saved every 20 seconds: the same command goes on from there.
"""

PARTS = """\
parts, in this order:
  exponents         a net whose weights all have no scale, noisy digits (needs scikit-learn); about 7 minutes of a core
  gpt               a GPT of a million parameters on prose; 20 minutes
  resnet            a ResNet of 20,000 parameters on CIFAR-10; needs --data; 11 minutes
  resnet-exponents  exponents of that ResNet; needs --data; 15 minutes
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.which_decay",
        description=DESCRIPTION,
        epilog=PARTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--part", action="append", choices=NAMES, help="repeatable; default: all that data are there for"
    )
    result.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="prose, a file or a folder of texts; default: Debian's package anarchism",
    )
    result.add_argument("--data", type=Path, metavar="DIR", help="folder with CIFAR-10; nothing is downloaded")
    result.add_argument("--seeds", type=positive, help="default: 3")
    result.add_argument("--jobs", type=positive, default=1, help="runs at a time, a thread each; default: %(default)s")
    result.add_argument("--quick", action="store_true", help="a few steps of small models, to see that it works")
    result.add_argument(
        "--draw", action="store_true", help="train nothing: tables and pictures of the runs that are there"
    )
    result.add_argument(
        "--out", type=Path, default=Path("results/which_decay"), metavar="DIR", help="default: %(default)s"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers must not outlive this process
    torch.set_num_threads(1)  # these models are too small for more
    try:
        carry_out(options, console)
    except DataError as error:
        sys.exit(f"python -m benchmarks.which_decay: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. What has been computed is kept: the same command goes on from here.")


def carry_out(options: argparse.Namespace, console: Console) -> None:
    sources = Sources(options.text, options.data, options.quick)
    place = Place(sources, options.out / "runs", options.jobs)
    chosen = chosen_parts(options, sources, console)
    if not options.draw:
        for part, data in chosen:
            run_all(part.name, part.runs(data), place, console)
            if isinstance(part, Grid):
                more = list(part.more_seeds(data, Store(place.store)))
                run_all(f"{part.name}, more seeds", more, place, console)
    report(chosen, Store(place.store), options.out, console)


Chosen = list[tuple[Stairs | Grid, str]]


def chosen_parts(options: argparse.Namespace, sources: Sources, console: Console) -> Chosen:
    """Each with the name of its data. What is not asked for by name is left out if its data are missing."""
    chosen: Chosen = []
    for part in QUICK if options.quick else FULL:
        if options.part and part.name not in options.part:
            continue
        try:
            data = task_of(part.task, sources).data
        except DataError as error:
            if options.part:
                raise
            console.print(f"Without {part.name}: {error}", soft_wrap=True)
            continue
        chosen.append((replace(part, seeds=options.seeds or part.seeds), data))
    return chosen


def report(chosen: Chosen, store: Store, out: Path, console: Console) -> None:
    """Writes what there is, also of parts that are not finished."""
    content: dict[str, list[Row]] = {"losses": [], "curves": [], "exponents": []}
    texts = []
    for part, data in chosen:
        runs = [run for run in all_runs(part, data, store) if store.has(run)]
        if isinstance(part, Stairs):
            shown = [add_exponents(part, runs, store, content)]
        else:
            shown = add_losses(part, runs, store, content)
        for title, headings, cells in shown:
            if cells:
                console.print(table(title, headings, cells))
                texts.append(markdown(title, headings, cells))
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "which_decay.md"]
    written[0].write_text("\n".join(texts))
    for name, rows in content.items():
        if rows:
            written.append(out / f"which_decay_{name}.csv")
            write_rows(written[-1], [shortened(line) for line in rows])
    console.print(f"Wrote {', '.join(map(str, [*written, *plot(out)]))}", soft_wrap=True)


Shown = tuple[str, list[str], Cells]


def add_exponents(part: Stairs, runs: Sequence[Run], store: Store, content: dict[str, list[Row]]) -> Shown:
    measured: list[Stage] = []
    for run in runs:
        trained, conditions = store.load(run)
        of_run = stages(run, trained)
        measured += of_run
        content["exponents"] += [{**asdict(stage), **conditions} for stage in of_run]
    title = f"{part.name}: exponents of the learning rate, {part.task}, decay {part.decays[0]:g}"
    return title, EXPONENT_HEADINGS, exponent_cells(exponents(measured), measured)


def add_losses(part: Grid, runs: Sequence[Run], store: Store, content: dict[str, list[Row]]) -> list[Shown]:
    rows = []
    for run in runs:
        trained, conditions = store.load(run)
        rows.append({**row(run, trained), **conditions})
        which = {"task": run.task, "contender": run.contender, "decay": run.decay, "seed": run.seed}
        content["curves"] += [{**which, **asdict(point)} for point in trained.points]
    content["losses"] += rows
    title = f"{part.name}: losses at the best decay, {part.schedule.steps} steps"
    shown: list[Shown] = [(title, LOSS_HEADINGS, loss_cells(findings(rows)))]
    if part.too_much is not None:
        title = f"{part.name}: losses at a decay of {part.too_much:g}, {part.schedule.steps} steps"
        shown.append((title, LOSS_HEADINGS, loss_cells(findings(rows, at=part.too_much))))
    return shown


def all_runs(part: Stairs | Grid, data: str, store: Store) -> list[Run]:
    return part.runs(data) + (list(part.more_seeds(data, store)) if isinstance(part, Grid) else [])


def shortened(values: Row) -> Row:
    """Six digits: the rest is rounding, and differs from machine to machine."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}
