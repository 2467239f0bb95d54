"""Functions on several ranks of this machine: gloo on loopback, forked from a process that has torch loaded.

Each rank works in a folder of its own, which has what it printed, how far it came and what it returned.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240
SECONDS_AFTER_A_FAILURE = 2  # for the others to fail too: who ends first may only have lost the one at fault
SECONDS_TO_PRINT_STACKS = 10

OUTPUT, PHASE, ANSWER = "output.txt", "phase.txt", "answer.pickle"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "numpy", "swd_fused"])


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns on each rank. A crash or an exception on any of them is an AssertionError here."""
    with tempfile.TemporaryDirectory(prefix="swd_fused-ranks-") as directory:
        folders = [Path(directory, f"rank-{rank}") for rank in range(world_size)]
        processes = [
            context.Process(target=_on_rank, args=(rank, folders, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for folder, process in zip(folders, processes, strict=True):
            folder.mkdir()
            process.start()
        try:
            _wait_for(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        failures = [
            f"rank {rank} ended {_text(folder / PHASE) or 'in start-up'} with {process.exitcode}. It printed:\n"
            f"{_text(folder / OUTPUT)}"
            for rank, (folder, process) in enumerate(zip(folders, processes, strict=True))
            if process.exitcode or not (folder / ANSWER).exists()
        ]
        assert not failures, "\n".join(failures)
        print("".join(_text(folder / OUTPUT) for folder in folders), end="")
        return [pickle.loads((folder / ANSWER).read_bytes()) for folder in folders]


@cache
def _once(world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any] | AssertionError:
    try:
        return on_ranks(world_size, function, *args)
    except AssertionError as error:
        return error


def once_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same, started by the first test that asks: many cases share one start, and one failure."""
    answers = _once(world_size, function, args)
    if isinstance(answers, AssertionError):
        raise answers
    return answers


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _wait_for(processes: list[Any]) -> None:
    """Waits for all to end, or until some time after a first failure. Those that are left then print their stacks."""
    end = time.monotonic() + SECONDS
    running = {process.sentinel: process for process in processes}
    while running and time.monotonic() < end:
        for sentinel in wait(list(running), end - time.monotonic()):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                end = min(end, time.monotonic() + SECONDS_AFTER_A_FAILURE)
    for process in running.values():
        os.kill(process.pid, signal.SIGABRT)
        process.join(SECONDS_TO_PRINT_STACKS)


def _on_rank(rank: int, folders: list[Path], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.chdir(folders[rank])
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # a crash loses what is buffered
    faulthandler.enable(all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world_size, timeout = len(folders), timedelta(seconds=60)
    store = dist.FileStore(str(folders[0].parent / "start"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    Path(PHASE).write_text("at work")
    answer = function(*args)
    dist.barrier()
    Path(ANSWER).write_bytes(pickle.dumps(answer))
    Path(PHASE).write_text("in teardown")
    dist.destroy_process_group()


@contextmanager
def counted_all_reduces(counts: list[int]) -> Iterator[None]:
    """Appends how many all-reduces there are within it."""
    counts.append(0)
    all_reduce = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    try:
        yield
    finally:
        dist.all_reduce = all_reduce
