"""Carries runs out, some at a time, keeps what they measured, and shows how far they are."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.conditions import OtherLoad, conditions
from benchmarks.which_decay.run import Run, Store
from benchmarks.which_decay.tasks import Sources, task_of
from benchmarks.which_decay.training import train


@dataclass(frozen=True)
class Place:
    sources: Sources
    store: Path
    jobs: int


def carry_out(run: Run, place: Place, after_steps: Callable[[int], None] = lambda steps: None) -> Run:
    other_load, store = OtherLoad(), Store(place.store)
    trained = train(run, task_of(run.task, place.sources), store.checkpoint(run), after_steps)
    store.save(run, trained, conditions(other_load))
    return run


def run_all(what: str, runs: Sequence[Run], place: Place, console: Console) -> None:
    """Carries out all that are not finished."""
    store = Store(place.store)
    missing = [run for run in runs if not store.has(run)]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as progress:
        total = sum(run.schedule.steps for run in runs)
        bar = progress.add_task("", total=total)
        progress.advance(bar, total - sum(run.schedule.steps for run in missing))
        done = len(runs) - len(missing)
        progress.update(bar, description=f"{what}: {done} of {len(runs)} runs")
        for _ in finished(missing, place, lambda steps: progress.advance(bar, steps)):
            done += 1
            progress.update(bar, description=f"{what}: {done} of {len(runs)} runs")


def finished(missing: Sequence[Run], place: Place, after_steps: Callable[[int], None]) -> Iterator[Run]:
    """Yields runs as they end."""
    if place.jobs == 1 or len(missing) < 2:
        for run in missing:
            yield carry_out(run, place, after_steps)
        return
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(place.jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        try:
            for future in as_completed([pool.submit(carry_out, run, place) for run in missing]):
                after_steps(future.result().schedule.steps)
                yield future.result()
        except BaseException:  # an interrupt too: runs under way have been saved and are not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all, and the parent ends them
    torch.set_num_threads(1)
