"""Carries runs out, several at a time on a CPU, and shows how far they are."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.paper.checkpoint import SAVE_EVERY, Checkpoint
from benchmarks.paper.effort import Effort
from benchmarks.paper.kept_net import KeptNet
from benchmarks.paper.language_training import train_language
from benchmarks.paper.models import LANGUAGE_MODELS
from benchmarks.paper.needs import check_needs
from benchmarks.paper.run import Run
from benchmarks.paper.sharpness_training import train_with_eigenvalues
from benchmarks.paper.store import Store, conditions
from benchmarks.paper.training import train_images


@dataclass(frozen=True)
class Place:
    """Where data are read, results go and computing happens."""

    data: Path | None
    store: Path
    device: str
    workers: int
    save_every: float = SAVE_EVERY  # seconds, of runs under way


def carry_out(run: Run, place: Place, after_epoch: Callable[[], None]) -> None:
    device, store = torch.device(place.device), Store(place.store)
    kept, effort = KeptNet(store.path(run).with_suffix(".pt")), Effort()
    checkpoint = Checkpoint(store.path(run).with_suffix(".checkpoint"), effort, place.save_every)
    if run.eigenvalues:
        trained = train_with_eigenvalues(run, place.data, device, after_epoch, kept, checkpoint)
    else:
        train = train_language if run.model in LANGUAGE_MODELS else train_images
        with effort.counted():
            trained = train(run, place.data, device, after_epoch, checkpoint)
    store.save(run, trained, conditions(device, effort.seconds, effort.warnings))
    kept.remove()
    checkpoint.remove()


def run_all(runs: Sequence[Run], place: Place, console: Console) -> None:
    """All that are not finished. Shared ones are run once."""
    store = Store(place.store)
    with_eigenvalues = {run.training for run in runs if run.eigenvalues}
    every = [run for run in dict.fromkeys(runs) if run not in with_eigenvalues]
    remaining = [run for run in every if store.find(run) is None]
    if not every:
        return
    check_needs(remaining, place.data)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=sum(run.epochs for run in every))
        progress.advance(bar, sum(run.epochs for run in every) - sum(run.epochs for run in remaining))
        done = len(every) - len(remaining)

        def finished(count: int) -> None:
            nonlocal done
            done += count
            progress.update(bar, description=f"{done} of {len(every)} runs")

        def epoch_passed() -> None:
            progress.advance(bar)

        finished(0)
        if place.workers == 1:
            for run in remaining:
                carry_out(run, place, epoch_passed)
                finished(1)
        elif remaining:
            _in_processes(remaining, place, epoch_passed, finished)


def _in_processes(
    remaining: Sequence[Run], place: Place, epoch_passed: Callable[[], None], finished: Callable[[int], None]
) -> None:
    """One thread in each process: these nets are so small that a second one gains less than a second run."""
    context = multiprocessing.get_context("spawn")
    epochs = context.Queue()
    threads = max(1, torch.get_num_threads() // place.workers)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(place.workers, context, _begin, (epochs, threads)) as pool:
        waiting = {pool.submit(_work, run, place) for run in remaining}
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                finished(len(ended))
                for _ in range(epochs.qsize()):
                    try:
                        epochs.get_nowait()
                    except Empty:
                        break
                    epoch_passed()
        except BaseException:  # an interrupt too: what is being trained goes on from its checkpoint another time
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


_epochs: Any = None


def _begin(epochs: Any, threads: int) -> None:
    global _epochs
    _epochs = epochs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all, and the parent ends them
    torch.set_num_threads(threads)


def _work(run: Run, place: Place) -> None:
    carry_out(run, place, lambda: _epochs.put(None))
