"""Functions on several ranks of this machine: gloo on loopback, forked from a process that has torch loaded.

Each rank works in a folder of its own, which has what it printed, how far it came, what it returned and, after a crash,
its core dump. The folders of a crash are kept.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
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
    directory = Path(tempfile.mkdtemp(prefix="swd_fused-ranks-"))
    ranks = [Rank(number, world_size, directory, function, args) for number in range(world_size)]
    for rank in ranks:
        rank.process.start()
    try:
        _wait_for(ranks)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
    failures = [rank.failure() for rank in ranks if rank.has_failed()]
    answers = [] if failures else [pickle.loads((rank.folder / ANSWER).read_bytes()) for rank in ranks]
    if not failures:
        print("".join(rank.output() for rank in ranks), end="")
    if not any(rank.has_crashed() for rank in ranks):
        shutil.rmtree(directory)
    assert not failures, "\n".join(failures)
    return answers


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


# --- Seen from outside


class Rank:
    """A process and its folder."""

    def __init__(
        self, number: int, world_size: int, directory: Path, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.number = number
        self.folder = directory / f"rank-{number}"
        self.folder.mkdir()
        arguments = (number, world_size, str(directory / "start"), self.folder, function, args)
        self.process: Any = context.Process(target=_on_rank, args=arguments, daemon=True)
        self.ended_after: float | None = None  # seconds, if we had to end it

    def end(self, seconds: float) -> None:
        """Ends a rank that others wait for no longer. It prints its stacks, and dumps no core."""
        self.ended_after = seconds
        with suppress(ProcessLookupError):  # it has ended by itself just now
            hard_limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
            resource.prlimit(self.process.pid, resource.RLIMIT_CORE, (0, hard_limit))
            os.kill(self.process.pid, signal.SIGABRT)
        self.process.join(SECONDS_TO_PRINT_STACKS)

    def has_crashed(self) -> bool:
        return self.ended_after is None and self.process.exitcode < 0

    def has_failed(self) -> bool:
        return self.ended_after is not None or self.process.exitcode != 0 or not (self.folder / ANSWER).exists()

    def output(self) -> str:
        return self._text(OUTPUT)

    def failure(self) -> str:
        """Tells how and where the rank has failed, and what it has printed."""
        phase, code = self._text(PHASE) or "in start-up", self.process.exitcode
        if self.ended_after is not None:
            what = f"was still {phase} after {self.ended_after:.0f} s, and was aborted"
        elif self.has_crashed():
            what = f"died {phase}: {signal.Signals(-code).name}. {self._core_dump()}"
        else:
            what = f"failed {phase}: exit code {code}"
        return f"rank {self.number} {what}. It printed:\n{self.output()}"

    def _core_dump(self) -> str:
        core = next(self.folder.glob("core*"), None)
        if core is not None:
            return f"Its core dump: {core}, in which gdb finds:\n{native_stacks(core)}"
        pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
        limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
        return (
            f"No core dump in {self.folder}: it was process {self.process.pid}, kernel.core_pattern is {pattern!r}, "
            f"and the hard limit of a core dump's size {'none' if limit == resource.RLIM_INFINITY else limit}"
        )

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""


def native_stacks(core: Path) -> str:
    """Returns the stacks of all threads, the crashed one's first: machine and core dump may soon be gone."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return "gdb is not installed here"
    script = ["-ex", "backtrace 40", "-ex", "thread apply all backtrace 20"]
    offline = {**os.environ, "DEBUGINFOD_URLS": ""}  # else it may download symbols for minutes
    command = [gdb, "-batch", "-nx", *script, sys.executable, str(core)]
    run = subprocess.run(command, env=offline, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return "".join(line for line in run.stdout.splitlines(keepends=True) if not line.startswith("[New LWP"))


def _wait_for(ranks: list[Rank]) -> None:
    """Waits for all to end, or until some time after a first failure, when the others are ended."""
    begin = time.monotonic()
    end = begin + SECONDS
    running = {rank.process.sentinel: rank for rank in ranks}
    while running and time.monotonic() < end:
        for sentinel in wait(list(running), end - time.monotonic()):
            rank = running.pop(sentinel)
            rank.process.join()
            if rank.has_failed():
                end = min(end, time.monotonic() + SECONDS_AFTER_A_FAILURE)
    seconds = time.monotonic() - begin
    for rank in running.values():
        rank.end(seconds)


# --- Seen from inside


def _on_rank(
    rank: int, world_size: int, start: str, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    _make_failures_speak(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(start, world_size)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    (folder / PHASE).write_text("at work")
    answer = function(*args)
    dist.barrier()
    (folder / ANSWER).write_bytes(pickle.dumps(answer))
    (folder / PHASE).write_text("in teardown")
    dist.destroy_process_group()


def _make_failures_speak(folder: Path) -> None:
    """Has everything that is printed go to a file, and a crash print the stacks of all threads and dump core."""
    os.chdir(folder)  # where Linux puts core dumps unless told otherwise
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # a crash loses what is buffered
    faulthandler.enable(all_threads=True)
    hard_limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard_limit, hard_limit))
