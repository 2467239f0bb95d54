"""Functions on several ranks of this machine: gloo on loopback, forked from a process that has torch loaded."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "numpy", "swd_fused"])


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns on each rank. An exception on any of them is one here."""
    with tempfile.TemporaryDirectory() as directory:
        results: Any = context.Queue()
        start = str(Path(directory) / "start")
        processes = [
            context.Process(target=_on_rank, args=(rank, world_size, start, results, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            answers = _collected(results, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [f"rank {rank}:\n{answer}" for rank, (succeeded, answer) in sorted(answers.items()) if not succeeded]
    assert not failures, "\n".join(failures)
    return [pickle.loads(answer) for _, (_, answer) in sorted(answers.items())]


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


def _collected(results: Any, processes: list[Any]) -> dict[int, tuple[bool, Any]]:
    """One failure is enough: the others then wait for that rank."""
    answers: dict[int, tuple[bool, Any]] = {}
    end = time.monotonic() + SECONDS
    while len(answers) < len(processes) and all(succeeded for succeeded, _ in answers.values()):
        waiting = [rank for rank in range(len(processes)) if rank not in answers]
        dead = [rank for rank in waiting if processes[rank].exitcode]
        if not results.empty():
            rank, succeeded, answer = results.get()
            answers[rank] = succeeded, answer
        elif dead:
            answers[dead[0]] = False, f"died with exit code {processes[dead[0]].exitcode}"
        elif time.monotonic() > end:
            answers[waiting[0]] = False, f"ranks {waiting} did not finish within {SECONDS} s"
        else:
            time.sleep(0.05)
    return answers


def _on_rank(
    rank: int, world_size: int, start: str, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(start, world_size)
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        answer = function(*args)
        dist.barrier()
        results.put((rank, True, pickle.dumps(answer)))  # torch would send tensors as memory that dies with the rank
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise
