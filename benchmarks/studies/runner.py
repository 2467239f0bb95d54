"""Carries out the runs of a study, some at a time, and adds each to the store as it ends."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from rich.console import Console

from benchmarks.conditions import OtherLoad, conditions
from benchmarks.paper.data.cifar import DataError
from benchmarks.studies.store import Record, Store


class Run(Protocol):
    @property
    def key(self) -> str:
        """A name for its files. It changes with all that the result depends on."""


Results = dict[str, Record]  # by key
CONDITIONS = (
    *("seconds", "warnings", "threads", "device", "cpu", "cores", "other_load", "huge_pages"),
    *("torch", "swd_fused", "python", "date"),
)
Train = Callable[[Any], Record]


@dataclass
class Study:
    """What is trained, and in which order.

    `planned` names all runs that the finished ones let it name, in the order in which they are wanted: so a study goes
    on with the first run that is missing. What was interrupted is repeated: no run is trained by two versions of the
    code.
    """

    name: str
    store: Store
    train: Train
    planned: Callable[[Results], Sequence[Run]]
    key_of: Callable[[Record], str] = lambda record: str(record["key"])
    workers: int = 1
    threads: int = 1  # of each worker: a second one gains these small nets less than a second run
    device: str = "cpu"
    results: Results = field(default_factory=dict)

    def load(self) -> Results:
        self.results = {self.key_of(record): record for record in self.store.read()}
        return self.results

    def carry_out(self, console: Console) -> Results:
        with self.store.locked(), workers(self) as pool:
            self.load()
            self._take_turns(pool, console)
        return self.results

    def _take_turns(self, pool: Executor, console: Console) -> None:
        under_way: dict[Future[Record], Run] = {}
        began, ended = time.monotonic(), 0
        while True:
            planned = {run.key: run for run in self.planned(self.results)}
            begun = {run.key for run in under_way.values()} | self.results.keys()
            for run in [run for key, run in planned.items() if key not in begun][: self.workers - len(under_way)]:
                under_way[pool.submit(work, self.train, run, self.device)] = run
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                run, record = under_way.pop(future), future.result()
                self.store.append(record)
                self.results[run.key] = record
                ended += 1
                count = sum(key in self.results for key in planned)
                left = (time.monotonic() - began) / ended * (len(planned) - count) / 3600
                said = f"{self.name}: {count} of {len(planned)}, {run.key}; {left:.1f} hours left"
                console.print(said, soft_wrap=True, highlight=False)


def conditions_of(record: Record) -> dict[str, Any]:
    return {name: record[name] for name in CONDITIONS if name in record}


def shortened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Six digits: the rest is rounding, and differs from machine to machine."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}


def work(train: Train, run: Run, device: str) -> Record:
    load, began = OtherLoad(), time.monotonic()
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = train(run)
    took = {"seconds": round(time.monotonic() - began, 2), "warnings": len(caught)}
    return {"key": run.key, **record, **took, **conditions(load, name)}


class InThisProcess(Executor):
    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **options))
        return future


@contextmanager
def workers(study: Study) -> Iterator[Executor]:
    """Yields where runs are submitted to."""
    if study.workers == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(study.threads)
        try:
            yield InThisProcess()
        finally:
            torch.set_num_threads(threads)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(study.workers, context, _begin, (study.threads,)) as pool:
        try:
            yield pool
        except BaseException:  # an interrupt too: what is being trained is repeated another time
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _begin(threads: int) -> None:
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
