"""A report about FusedAdamS on a CUDA or ROCm GPU, in one Markdown file to attach to an issue.

Checks each mode against plain PyTorch, measures steps beside AdamW's and other packages', compares with the memory's
peak rate, and counts launches and waits. Each section runs in a process of its own with a time limit, and is in the
file as soon as it ends: one that fails, crashes or hangs is reported, and does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import gpu, gpu_modes
from benchmarks.gpu_sections import escaped, markdown_table
from benchmarks.step_times.pictures import plot_step_time

MEASURED_SUITES = ("one-64M", "gpt2-124m", "one-1M", "1000x500")
# Seconds of a section unless --limit says otherwise. A mode takes some ten; the others compile or measure for minutes.
MODE_LIMIT, LIMIT = 90.0, 300.0
# A process ends itself at its limit. One that cannot, as in a call of the driver, is killed so much later.
GRACE_SECONDS = 10.0
PRINTED_CHARACTERS = 20_000  # of warnings and tracebacks, from their end
ISSUE = "https://github.com/swd-fused/swd_fused/issues/new?template=gpu_report.yml"


@dataclass(frozen=True)
class Section:
    """A function that prints Markdown."""

    title: str
    function: str
    arguments: tuple[Any, ...] = ()
    limit: float = LIMIT
    module: str = "benchmarks.gpu_sections"


def sections(is_quick: bool, out: Path) -> list[Section]:
    return [
        Section("Environment", "environment", limit=MODE_LIMIT),
        *(Section(f"Mode: {mode.name}", "mode", (mode.name,), MODE_LIMIT) for mode in gpu_modes.MODES),
        Section("Launches and waits", "launches", (is_quick,)),
        Section("Share of the memory's peak rate", "peak", (is_quick, str(out))),
        *(Section(f"Step times: {name}", "step_times", (name, is_quick, str(out))) for name in MEASURED_SUITES),
    ]


@dataclass(frozen=True)
class Outcome:
    """`problem` tells why a section did not end well. `noise` is what it printed beside its text, as warnings."""

    title: str
    text: str
    problem: str | None = None
    noise: str = ""
    seconds: float = 0.0

    @property
    def details(self) -> str:
        """Returns what does not fit into the table's cell."""
        printed = f"It printed:\n\n```text\n{self.noise}\n```" if self.noise else ""
        is_said = not (self.problem or self.noise or "\n" in self.text)
        return "" if is_said else "\n\n".join(filter(None, [f"## {self.title}", self.text, printed]))

    @property
    def said(self) -> str:
        return f"**problem**: {self.problem}" if self.problem else "ok" if self.details else self.text or "ok"


def outcome_of(section: Section, limit: float) -> Outcome:
    """Runs a section in a process of its own. The limit is set before torch is imported, which can hang as well."""
    code = (
        f"import faulthandler; faulthandler.enable(); faulthandler.dump_traceback_later({limit}, exit=True)\n"
        f"from {section.module} import {section.function}; {section.function}(*{section.arguments!r})"
    )
    start = perf_counter()
    with tempfile.TemporaryFile("w+") as text, tempfile.TemporaryFile("w+") as noise:
        # In a session of its own, so that compilers which it has started can be ended with it.
        process = subprocess.Popen([sys.executable, "-c", code], stdout=text, stderr=noise, start_new_session=True)
        try:
            ended = process.wait(limit + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that the kernel cannot even kill is left alone
                process.wait(GRACE_SECONDS)
        seconds = perf_counter() - start
        for file in (text, noise):
            file.seek(0)
        printed = noise.read().strip()[-PRINTED_CHARACTERS:]
        found = problem(ended, printed, seconds >= limit, f"{limit:g}")
        return Outcome(section.title, text.read().strip(), found, printed, seconds)


def problem(ended: int | None, printed: str, is_late: bool, limit: str) -> str | None:
    if ended == 0:
        return None
    if ended is None or is_late:
        how = "; it had to be killed" if ended is None else ""
        return f"did not end within {limit} s; the stacks of its threads are below{how}"
    if ended < 0:
        return f"was ended by {signal.Signals(-ended).name}"
    return f"ended with exit code {ended}; {printed.splitlines()[-1] if printed else ''}"  # which names the exception


def report_of(outcomes: Sequence[Outcome], is_quick: bool, missing: Sequence[str] = ()) -> str:
    parts = ["# GPU report of swd_fused"]
    if is_quick:
        parts.append("Run with --quick: tensors are so small that times say little, whatever their suites' names say.")
    rows = [[outcome.title, outcome.said, f"{outcome.seconds:.0f}"] for outcome in outcomes]
    rows += [[title, "not run", ""] for title in missing]
    parts += [
        f"Each section ran in a process of its own. A mode takes {gpu_modes.STEPS} steps beside the torch backend on "
        "the CPU; the largest difference of parameters, state and logged values counts.",
        markdown_table(["section", "outcome", "seconds"], rows),
    ]
    return "\n\n".join([*parts, *filter(None, (outcome.details for outcome in outcomes))]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 1 if the report has problems."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tensors and few repeats: does everything run?")
    limits = f"{MODE_LIMIT:g} or {LIMIT:g}"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"of each section; default: {limits}")
    out = Path("results/gpu_report")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if missing := gpu.missing():
        parser.error(f"{missing} Or try tests/virtual_gpu/run python -m benchmarks.gpu_report --quick")
    options.out.mkdir(parents=True, exist_ok=True)
    report, tables = options.out / "gpu_report.md", [options.out / name for name in ("step_time.csv", "modes.csv")]
    for path in tables:
        path.unlink(missing_ok=True)  # of an earlier report
    outcomes: list[Outcome] = []
    plan = sections(options.quick, options.out)
    for place, section in enumerate(plan):
        print(f"{place + 1} of {len(plan)}, {section.title}: ", end="", flush=True)
        outcomes.append(outcome_of(section, options.limit or section.limit))
        print(f"{escaped(outcomes[-1].said).replace('**', '')}, {outcomes[-1].seconds:.0f} s", flush=True)
        report.write_text(report_of(outcomes, options.quick, [later.title for later in plan[place + 1 :]]))
    paths = [report, *(path for path in tables if path.exists())]
    if tables[0].exists():
        paths.append(plot_step_time(tables[0]))
    print(f"Wrote {', '.join(map(str, paths))}\nPlease attach them to {ISSUE}")
    return int(any(outcome.problem is not None for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
