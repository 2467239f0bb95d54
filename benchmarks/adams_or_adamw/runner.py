"""Carries out the runs of an arm, some at a time, and appends a row as each of them ends."""

from __future__ import annotations

import multiprocessing
import signal
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.adams_or_adamw.plan import Arm, Planned, key_of
from benchmarks.adams_or_adamw.rows import Rows
from benchmarks.adams_or_adamw.training import trained


def run_arm(arm: Arm, root: Path | None, rows: Rows, workers: int, console: Console) -> None:
    """Which runs come next follows from the rows there are, so this goes on where it was interrupted."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    under_way: dict[Future[dict[str, object]], Planned] = {}
    began, ended_here = time.perf_counter(), 0
    with (
        rows.locked(),
        # Without a terminal the bar would be empty lines; the line for each run is enough there.
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(workers, context, _begin) as pool,
    ):
        bar = progress.add_task(f"arm {arm.name}", total=None)
        try:
            while True:
                finished = rows.read()
                done = {key_of(row) for row in finished}
                total, count = arm.most_runs(finished), sum(row["arm"] == arm.name for row in finished)
                left = time_left(time.perf_counter() - began, ended_here, total - count)
                progress.update(bar, completed=count, total=total, description=f"arm {arm.name}, {left}")
                for planned in arm.planned(finished):
                    if len(under_way) == workers:
                        break
                    if planned.key not in done and planned not in under_way.values():
                        under_way[pool.submit(trained, planned, arm.task, root)] = planned
                if not under_way:
                    return
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    row = future.result()
                    rows.append(row)
                    ended_here += 1
                    left = time_left(time.perf_counter() - began, ended_here, total - count - 1)
                    console.print(f"{count + 1} of {total}: {said(row)}; {left}", soft_wrap=True, highlight=False)
                    del under_way[future]
                    count += 1
        except BaseException:  # an interrupt too: runs under way are lost and will be repeated
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def said(row: dict[str, object]) -> str:
    return (
        f"arm {row['arm']}, {row['role']}, {row['contender']} {row['weight_decay']}, seed {row['seed']}: "
        f"error {100 * float(str(row['error'])):.2f}%, training loss {row['train_loss']}, {row['cpu_seconds']} CPU-s"
    )


def time_left(seconds: float, ended: int, left: int) -> str:
    if not ended:
        return "time left not known yet"
    return f"{seconds / ended * left / 3600:.1f} hours left"


def _begin() -> None:
    """One thread in each process: this network is so small that a second thread gains less than a second run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all, and the parent ends them
    torch.set_num_threads(1)
