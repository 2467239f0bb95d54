"""The command line: chooses runs, carries them out, writes the CSV and draws the figure from it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.arguments import positive
from benchmarks.paper.data import DataError
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.figures import DRAWINGS
from benchmarks.paper.figures.rows import read_rows
from benchmarks.paper.presets import PRESETS
from benchmarks.paper.run import Run
from benchmarks.paper.runner import Place, run_all
from benchmarks.paper.store import Store, write_csv
from benchmarks.paper.summary import summary

ALL = "all"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<10} {experiment.what}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description="The experiments of the paper on Scheduled Weight Decay. Each writes a CSV file and a figure.\n"
        "Finished runs are kept: the same command goes on where it was interrupted, and\n"
        "experiments share the runs that they have in common.",
        epilog=f"experiments:\n{listed}\n  {ALL:<10} all of these",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=[*EXPERIMENTS, ALL], metavar="experiment", help="one of those below")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="quick",
        help="quick: small nets on real data, minutes on two cores (default); paper: the paper's settings, for a GPU; "
        "tiny: noise, seconds, to try the command out",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with CIFAR-10 or -100 (Python or binary version), ImageNet (imagenet/train, imagenet/val), Penn "
        "TreeBank (ptb.train.txt, ...) or Fashion-MNIST (else that of Debian's package); nothing is downloaded",
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
    parser.add_argument("--draw", action="store_true", help="run nothing: draw again from the CSV files in --out")
    args = parser.parse_args(argv)
    args.out = args.out or Path("results/paper" if args.preset == "quick" else f"results/paper-{args.preset}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.draw:
        check_device(args.device, parser)
    if args.workers is None:
        args.workers = (os.cpu_count() or 1) if args.device == "cpu" else 1
    args.names = list(EXPERIMENTS) if args.experiment == ALL else [args.experiment]
    args.runs = {} if args.draw else {name: chosen_runs(name, args, parser) for name in args.names}
    if not args.draw:
        args.names = [name for name in args.names if args.runs[name]]
    return args


def check_device(name: str, parser: argparse.ArgumentParser) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError) as error:  # the last two where torch was built without it
        reason = str(error).partition("\n")[0]
        parser.error(f"--device {name} cannot be used here: {reason}. Wanted auto, cpu or one that this torch has.")


def chosen_runs(name: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Run]:
    preset = PRESETS[args.preset]
    if args.seeds is not None:
        preset = replace(preset, seeds=tuple(range(args.seeds)))
    runs = EXPERIMENTS[name].runs(preset)
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
        sys.exit("Interrupted. Finished runs are kept: the same command goes on from here.")


def carry_out(args: argparse.Namespace, console: Console) -> None:
    if not args.draw:
        place = Place(args.data, args.out / "runs", args.device, args.workers)
        run_all([run for name in args.names for run in args.runs[name]], place, console)
    for name in args.names:
        table, picture = args.out / f"{name}.csv", args.out / f"{name}.png"
        if not args.draw:
            store = Store(args.out / "runs")
            write_csv(table, [store.load(run) for run in args.runs[name]], EXPERIMENTS[name].rows)
        rows = read_rows(table)
        DRAWINGS[name](rows, picture)
        console.print(summary(rows, f"{name}: {EXPERIMENTS[name].what}"))
        console.print(f"{table}\n{picture}", soft_wrap=True)
