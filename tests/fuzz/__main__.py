"""Random training runs against the definition: python -m tests.fuzz --cases 1000 --seed 7

A failing case prints the command that runs it again.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.fuzz.campaign import Failure, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many, from 0 on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, and what it is made of")
    parser.add_argument("--triton", action="store_true", help="the kernels of the triton backend, interpreted: slow")
    parser.add_argument("--stop", action="store_true", help="at the first failure")
    arguments = parser.parse_args()
    numbers = range(arguments.cases) if arguments.case is None else [arguments.case]
    console = Console(soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed: list[Failure] = []
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"seed {arguments.seed}", total=len(numbers))
        for failure in failures(arguments.seed, numbers, arguments.triton):
            progress.advance(task)
            if failure is not None:
                failed.append(failure)
                progress.update(task, description=f"seed {arguments.seed}, {len(failed)} failed")
                console.print(str(failure), markup=False)
                if arguments.case is not None:
                    console.print(str(failure.case), markup=False)
                if arguments.stop:
                    break
    console.print(f"{len(failed)} of {len(numbers)} cases failed", markup=False)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
