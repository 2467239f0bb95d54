"""The command line: chooses runs, carries them out, writes the CSV and draws the figure from it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from benchmarks.conditions import positive, write_rows
from benchmarks.paper.data import check_images
from benchmarks.paper.experiments import EXPERIMENTS, PRESETS, planned
from benchmarks.paper.figures import DRAWINGS, at_end
from benchmarks.paper.run import Run
from benchmarks.paper.training import trained
from benchmarks.paper.tuning import Planned, Result
from benchmarks.studies.rows import Row, grouped, read_rows
from benchmarks.studies.runner import Results, Study, command, conditions_of, shortened
from benchmarks.studies.store import Store

ALL = "all"
BY = ("role", "data", "model", "optimizer", "lr", "weight_decay", "epochs")
MEASURES = {"test_error": ("test error, %", 100), "train_loss": ("train loss", 1), "squared_grad_norm": ("G", 1)}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<18} {what}" for name, what in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description="The experiments of the paper on Scheduled Weight Decay. Each writes a CSV file and a figure.\n"
        "Finished runs are kept: the same command goes on with the first that is missing, and experiments\n"
        "share the runs that they have in common.",
        epilog=f"experiments:\n{listed}\n  {ALL:<18} all of these",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=[*EXPERIMENTS, ALL], metavar="experiment", help="one of those below")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="quick",
        help="quick: small nets on scikit-learn's digits, minutes on two cores (default); real: small nets on "
        "CIFAR-10, with lambda tuned on validation data, two hours on two cores; paper: the paper's settings, for a "
        "GPU; tiny: noise, seconds, to try the command out",
    )
    folder = "folder with the binary version of CIFAR-10 or -100; nothing is downloaded"
    parser.add_argument("--data", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: results/paper, or results/paper-PRESET")
    parser.add_argument("--task", nargs="+", metavar="DATA/MODEL", help="only these, such as cifar10/resnet18")
    parser.add_argument("--seeds", type=positive, metavar="N", help="how many; default: 3")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="runs at a time (default: a core each; 1 on a GPU)"
    )
    parser.add_argument("--draw", action="store_true", help="run nothing: draw again from the CSV files in --out")
    args = parser.parse_args(argv)
    args.out = args.out or Path("results/paper" if args.preset == "quick" else f"results/paper-{args.preset}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.workers = args.workers or ((os.cpu_count() or 1) if args.device == "cpu" else 1)
    args.seeds = range(args.seeds or (2 if args.preset == "tiny" else 3))
    there = PRESETS[args.preset]
    args.names = list(there) if args.experiment == ALL else [args.experiment]
    if args.draw:
        return args
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError, ImportError) as error:  # the last two where torch was built without it
        reason = str(error).partition("\n")[0]
        parser.error(f"--device {args.device} cannot be used here: {reason}. Wanted auto, cpu or one that torch has.")
    if args.experiment not in (ALL, *there):
        parser.error(f"--preset {args.preset} has no {args.experiment}, wanted one of {', '.join(there)}")
    tasks = dict.fromkeys(run.task for name in args.names for run, _ in planned(there[name], [0], {}))
    args.names = [name for name in args.names if chosen_runs(name, args, {})]
    if not args.names:
        parser.error(f"--task {' '.join(args.task)} is not in {args.experiment}, wanted some of {', '.join(tasks)}")
    return args


def chosen_runs(name: str, args: argparse.Namespace, results: Results) -> list[Planned]:
    runs = planned(PRESETS[args.preset][name], args.seeds, results)
    return [each for each in runs if not args.task or each.run.task in args.task]


def in_order(args: argparse.Namespace, results: Results) -> list[Run]:
    """Returns all runs, those that choose first."""
    runs = list(dict.fromkeys(each.run for name in args.names for each in chosen_runs(name, args, results)))
    return sorted(runs, key=lambda run: run.part != "validation")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with command("paper") as console:
        results: Results = {}
        if not args.draw:
            threads = max(1, torch.get_num_threads() // args.workers)
            study = Study(
                name=f"{args.experiment}, {args.preset}",
                store=Store(args.out / "runs.jsonl"),
                train=partial(trained, root=args.data, device=args.device),
                planned=lambda found: in_order(args, found),
                workers=args.workers,
                threads=threads,
                device=args.device,
            )
            there = study.load()
            # All data that are wanted, before the first run, which may take days.
            for data in dict.fromkeys(run.data for run in in_order(args, there) if run.key not in there):
                check_images(data, args.data)
            results = study.carry_out(console)
        for name in args.names:
            table, picture = args.out / f"{name}.csv", args.out / f"{name}.png"
            if not args.draw:
                write_rows(table, [row for each in chosen_runs(name, args, results) for row in rows_of(each, results)])
            rows = read_rows(table)
            DRAWINGS[name](rows, picture)
            console.print(summary(rows, f"{name}: {EXPERIMENTS[name]}"))
            console.print(f"{table}\n{picture}", soft_wrap=True)


def rows_of(planned: Planned, results: Results) -> list[Row]:
    """Each with its role in an experiment that chooses some of its runs, its run, and the conditions of that."""
    result: Result = results[planned.run.key]
    role = {"role": planned.role} if planned.role else {}
    run = {k: " ".join(map(str, v)) if isinstance(v, list | tuple) else v for k, v in result["run"].items()}
    return [{**role, **run, **shortened(point), **conditions_of(result)} for point in result["points"]]


def summary(rows: list[Row], title: str) -> Table:
    """Mean and spread over seeds, at the end of training."""
    last = at_end(rows)
    by = [column for column in BY if column in last[0] and len({row[column] for row in last}) > 1] or ["optimizer"]
    seeds = len({row["seed"] for row in last})
    table = Table(title=title, caption=f"at the end of training; mean ± standard deviation of {seeds} seeds")
    for column in by:
        table.add_column({"weight_decay": "λ"}.get(column, column))
    for name in MEASURES:
        table.add_column(MEASURES[name][0], justify="right")
    for key, of_key in grouped(last, by).items():
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in key]
        for name, (_, scale) in MEASURES.items():
            values = scale * np.array([row[name] for row in of_key])  # NaN where a run diverged
            spread = f" ± {values.std(ddof=1):.1g}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.3g}{spread}")
        table.add_row(*cells)
    return table
