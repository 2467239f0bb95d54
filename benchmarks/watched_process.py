"""Runs a function in a process of its own, with a time limit and the stacks of all threads if it hangs or crashes."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

# The process ends itself at its limit. One that cannot, as in a call of the driver, is killed so much later; one that
# the kernel cannot even kill is left alone.
GRACE_SECONDS = 10.0
PRINTED_CHARACTERS = 20_000  # of what a process prints, from its end, where tracebacks are


@dataclass(frozen=True)
class Outcome:
    """`value` is what the function yielded last, None if it yielded nothing. `problem` tells why it did not end."""

    value: Any
    problem: str | None
    printed: str
    seconds: float


def watched(run: Callable[[], Iterator[Any]], limit: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Runs a generator function, which must be importable by name, and returns the last value that it yielded.

    What it yields is kept as it comes, so a process that hangs or crashes in the middle loses nothing before that.
    """
    start = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        yielded, output = Path(folder, "yielded"), Path(folder, "output")
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.watched_process", str(limit), str(yielded)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
                start_new_session=True,  # so that compilers which it has started can be ended with it
            )
        try:
            problem = _problem(process, pickle.dumps(run), limit)
        finally:
            _kill_group(process.pid)
        value = pickle.loads(yielded.read_bytes()) if yielded.exists() else None
        printed = output.read_text(errors="replace").strip()
    return Outcome(value, problem, printed[-PRINTED_CHARACTERS:], perf_counter() - start)


def _problem(process: subprocess.Popen[bytes], pickled: bytes, limit: float) -> str | None:
    """Waits for the process. Returns why it failed, None if it did not."""
    start = perf_counter()
    hung = f"did not end within {limit:g} s; the stacks of its threads are below"
    try:
        process.communicate(pickled, timeout=limit + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{hung}; it cannot be killed"
        return f"{hung}; it had to be killed"
    if process.returncode == 0:
        return None
    if perf_counter() - start >= limit:
        return hung
    if process.returncode < 0:
        return f"was ended by {signal.Signals(-process.returncode).name}"
    return f"ended with exit code {process.returncode}"


def _kill_group(process_id: int) -> None:
    try:
        os.killpg(process_id, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    """Runs the function that comes pickled on standard input. Nothing but the standard library is imported before the
    limit is set, so a hang while torch is imported shows its stacks, too."""
    limit, path = float(sys.argv[1]), Path(sys.argv[2])
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    run: Callable[[], Iterator[Any]] = pickle.load(sys.stdin.buffer)
    for value in run():
        new = path.with_suffix(".new")
        new.write_bytes(pickle.dumps(value))
        new.replace(path)  # at once: the process may end at any time
    # What a driver does when a process ends can hang as well, and then the values are there already.
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main()
