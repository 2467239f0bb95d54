"""Carries out the runs of a study, some at a time, and adds each to the store as it ends."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.conditions import OtherLoad, conditions
from benchmarks.paper.data.folders import DataError
from benchmarks.studies.checkpoint import SAVE_EVERY, Checkpoint
from benchmarks.studies.store import Record, Store


class Run(Protocol):
    @property
    def key(self) -> str:
        """A name for its files. It changes with all that the result depends on."""

    @property
    def windows(self) -> int: ...


Results = dict[str, Record]  # by key
CONDITIONS = (
    *("seconds", "warnings", "threads", "device", "cpu", "cores", "other_load", "huge_pages"),
    *("torch", "swd_fused", "python", "date"),
)
Train = Callable[[Any, Checkpoint, Callable[[], None]], Record]


@dataclass
class Study:
    """What is trained, and in which order.

    `train` takes a run, its checkpoint and what to call after each window. `planned` names all runs that the finished
    ones let it name, in the order in which they are wanted: so a study goes on wherever it was interrupted.
    """

    name: str
    store: Store
    train: Train
    planned: Callable[[Results], Sequence[Run]]
    key_of: Callable[[Record], str] = lambda record: str(record["key"])
    workers: int = 1
    threads: int = 1  # of each worker: a second one gains these small nets less than a second run
    device: str = "cpu"
    save_every: float | None = SAVE_EVERY  # seconds; None repeats what was interrupted
    results: Results = field(default_factory=dict)

    def load(self) -> Results:
        self.results = {self.key_of(record): record for record in self.store.read()}
        return self.results

    def checkpoint(self, run: Run) -> Checkpoint:
        if self.save_every is None:
            return Checkpoint()
        return Checkpoint(self.store.path.parent / f"{run.key}.checkpoint".replace(" ", "_"), self.save_every)

    def carry_out(self, console: Console) -> Results:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # Without a terminal the bar would be empty lines, and a line for each run takes its place.
        progress = Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600)
        with self.store.locked(), progress:
            bar = progress.add_task("")
            passed = 0

            def after_window() -> None:
                nonlocal passed
                passed += 1
                progress.update(bar, completed=before + passed)

            self.load()
            before = sum(run.windows for run in self.planned(self.results) if run.key in self.results)
            with workers(self, after_window) as (pool, poll):
                self._take_turns(pool, poll, progress, bar, console)
        return self.results

    def _take_turns(
        self, pool: Executor, poll: Callable[[], None], progress: Progress, bar: Any, console: Console
    ) -> None:
        under_way: dict[Future[Record], Run] = {}
        began, ended = time.monotonic(), 0
        while True:
            planned = {run.key: run for run in self.planned(self.results)}
            missing = [run for key, run in planned.items() if key not in self.results]
            said = f"{self.name}: {len(planned) - len(missing)} of {len(planned)} runs"
            progress.update(bar, total=sum(run.windows for run in planned.values()), description=said)
            keys = {run.key for run in under_way.values()}
            for run in [run for run in missing if run.key not in keys][: self.workers - len(under_way)]:
                under_way[pool.submit(work, self.train, run, self.checkpoint(run), self.device)] = run
            if not under_way:
                return
            finished: set[Future[Record]] = set()
            while not finished:
                finished = wait(under_way, timeout=0.2, return_when=FIRST_COMPLETED).done
                poll()
            for future in finished:
                run, record = under_way.pop(future), future.result()
                self.store.append(record)
                self.results[run.key] = record
                self.checkpoint(run).remove()
                ended += 1
                count = sum(key in self.results for key in planned)
                left = (time.monotonic() - began) / ended * (len(planned) - count) / 3600
                if not console.is_terminal:
                    said = f"{self.name}: {count} of {len(planned)}, {run.key}; {left:.1f} hours left"
                    console.print(said, soft_wrap=True, highlight=False)


def conditions_of(record: Record) -> dict[str, Any]:
    return {name: record[name] for name in CONDITIONS if name in record}


def shortened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Six digits: the rest is rounding, and differs from machine to machine."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}


def work(train: Train, run: Run, checkpoint: Checkpoint, device: str) -> Record:
    load = OtherLoad()
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    with checkpoint.counting():
        record = train(run, checkpoint, _after_window)
        took = {"seconds": round(checkpoint.seconds, 2), "warnings": len(checkpoint.warnings)}
    return {"key": run.key, **record, **took, **conditions(load, name)}


class InThisProcess(Executor):
    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **options))
        return future


_after_window: Callable[[], None] = lambda: None  # noqa: E731  set in each process that trains


@contextmanager
def workers(study: Study, after_window: Callable[[], None]) -> Iterator[tuple[Executor, Callable[[], None]]]:
    """Yields where runs are submitted to, and what tells of windows that passed there."""
    global _after_window
    if study.workers == 1:
        threads, _after_window = torch.get_num_threads(), after_window
        torch.set_num_threads(study.threads)
        try:
            yield InThisProcess(), lambda: None
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    windows = context.Queue()

    def poll() -> None:
        for _ in range(windows.qsize()):
            try:
                windows.get_nowait()
            except Empty:
                return
            after_window()

    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(study.workers, context, _begin, (windows, study.threads)) as pool:
        try:
            yield pool, poll
        except BaseException:  # an interrupt too: what is being trained goes on from its checkpoint another time
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _begin(windows: Any, threads: int) -> None:
    global _after_window
    _after_window = lambda: windows.put(None)  # noqa: E731
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all, and the parent ends them
    torch.set_num_threads(threads)


@contextmanager
def command(name: str) -> Iterator[Console]:
    """Ends with a sentence where data are missing or the user interrupts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers must not outlive this process
    try:
        yield Console(width=None if sys.stdout.isatty() else 160)
    except (DataError, FileNotFoundError) as error:
        sys.exit(f"python -m benchmarks.{name}: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. What has been computed is kept: the same command goes on from here.")
