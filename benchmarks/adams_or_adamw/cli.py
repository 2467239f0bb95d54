"""The command: run, report and plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.adams_or_adamw.plan import ARMS, Arm, key_of
from benchmarks.adams_or_adamw.plot import plot
from benchmarks.adams_or_adamw.report import report
from benchmarks.adams_or_adamw.training import FIELDS, trained
from benchmarks.conditions import positive
from benchmarks.paper.data import DataError, check_images
from benchmarks.studies.runner import Study, command
from benchmarks.studies.store import Store

OUT = Path(__file__).parents[1] / "results" / "adams_or_adamw"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adams_or_adamw", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="carry out the runs that are not there yet; may be interrupted at any time")
    run.add_argument("--data", type=Path, metavar="DIR", required=True, help="folder with CIFAR-10")
    run.add_argument("--arm", choices=ARMS, nargs="+", default=["A"], help="in this order (default: A)")
    run.add_argument("--workers", type=positive, default=2, metavar="N", help="runs at a time (default: 2)")
    others = (
        commands.add_parser("report", help="print what the finished runs say"),
        commands.add_parser("plot", help="draw what the finished runs say, beside their CSV file"),
    )
    for each in (run, *others):
        each.add_argument("--out", type=Path, metavar="DIR", help="folder of runs.csv (default: this repository's)")
    args = parser.parse_args(argv)
    args.out = args.out or OUT
    return args


def study(arm: Arm, root: Path | None, out: Path, workers: int) -> Study:
    """A run is one row."""
    return Study(
        name=f"arm {arm.name}",
        store=Store(out / "runs.csv", FIELDS),
        train=partial(trained, root=root),
        planned=lambda results: arm.planned(list(results.values())),
        key_of=key_of,
        workers=workers,
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with command("adams_or_adamw") as console:
        if args.command == "run":
            check_images("cifar10", args.data)
            for name in args.arm:
                study(ARMS[name], args.data, args.out, args.workers).carry_out(console)
            return
        rows = Store(args.out / "runs.csv", FIELDS).read()
        if not rows:
            raise DataError(f"{args.out / 'runs.csv'} has no runs, wanted those of the command run")
        if args.command == "report":
            report(rows, console)
            return
        picture = args.out / "adams_or_adamw.png"
        wrote = plot(rows, picture)
        console.print(f"Wrote {picture}" if wrote else "No pairs yet: nothing to draw.", soft_wrap=True)
