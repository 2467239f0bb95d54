"""The command: run, report and plot."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.adams_or_adamw.plan import ARMS, Arm
from benchmarks.adams_or_adamw.plot import plot
from benchmarks.adams_or_adamw.report import report
from benchmarks.adams_or_adamw.rows import Rows
from benchmarks.adams_or_adamw.runner import run_arm
from benchmarks.conditions import positive
from benchmarks.paper.data import DataError, check_images

OUT = Path(__file__).parents[1] / "results" / "adams_or_adamw"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adams_or_adamw", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="carry out the runs that are not there yet; may be interrupted at any time")
    run.add_argument("--data", type=Path, metavar="DIR", required=True, help="folder with CIFAR-10")
    run.add_argument("--arm", choices=ARMS, nargs="+", default=["A"], help="in this order (default: A)")
    run.add_argument("--workers", type=positive, default=2, metavar="N", help="runs at a time (default: 2)")
    run.add_argument("--epochs", type=positive, metavar="N", help="to try the command out: needs --out")
    run.add_argument("--images", type=positive, metavar="N", help="to try the command out: needs --out")
    others = (
        commands.add_parser("report", help="print what the finished runs say"),
        commands.add_parser("plot", help="draw what the finished runs say, beside their CSV file"),
    )
    for command in (run, *others):
        command.add_argument("--out", type=Path, metavar="DIR", help="folder of runs.csv (default: this repository's)")
    args = parser.parse_args(argv)
    if args.command == "run" and (args.epochs or args.images) and args.out is None:
        parser.error("--epochs and --images give other runs than those planned, wanted --out DIR for their rows")
    args.out = args.out or OUT
    return args


def chosen(name: str, epochs: int | None, images: int | None) -> Arm:
    arm = ARMS[name]
    if epochs is not None:
        arm = replace(arm, task=replace(arm.task, epochs=epochs, milestones=(), evaluate_every=epochs))
    if images is not None:
        arm = replace(arm, task=replace(arm.task, limit=images))
    return arm


def found(rows: Rows) -> list[dict[str, str]]:
    there = rows.read()
    if not there:
        raise DataError(f"{rows.path} has no runs, wanted those of python -m benchmarks.adams_or_adamw run")
    return there


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers must not outlive this process
    rows = Rows(args.out)
    try:
        if args.command == "run":
            check_images("cifar10", args.data)
            for name in args.arm:
                run_arm(chosen(name, args.epochs, args.images), args.data, rows, args.workers, console)
        elif args.command == "report":
            report(found(rows), console)
        else:
            picture = args.out / "adams_or_adamw.png"
            wrote = plot(found(rows), picture)
            console.print(f"Wrote {picture}" if wrote else "No pairs yet: nothing to draw.", soft_wrap=True)
    except (DataError, FileNotFoundError) as error:
        sys.exit(f"python -m benchmarks.adams_or_adamw: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on with the runs that are missing.")
