"""A report about FusedAdamS on a CUDA or ROCm GPU, in one Markdown file to attach to an issue.

Checks each mode against plain PyTorch, measures steps beside AdamW's and other packages', compares with the memory's
peak rate, and counts launches and waits. Each section runs in a process of its own with a time limit, and is in the
file as soon as it ends: one that fails, crashes or hangs is reported, and does not stop the others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import gpu_modes, gpu_sections
from benchmarks.conditions import write_rows
from benchmarks.gpu_sections import Result, escaped, markdown_table, traceback_block
from benchmarks.step_times.pictures import plot_step_time
from benchmarks.step_times.suites import SUITES, Suite, gpt2_shapes
from benchmarks.watched_process import Outcome, watched

MOST_REPEATS = 31
MEASURED_SUITES = ("one-64M", "gpt2-124m", "one-1M", "1000x500")
COUNTED_SHAPES = tuple(gpt2_shapes(layers=12, width=64, vocabulary=1000, context=64))
# Likenesses of the suites, to run everything and to time nothing: an emulated GPU takes minutes for them.
QUICK_SUITES = {
    "one-64M": Suite(((64, 256),), repeats=2),
    "gpt2-124m": Suite(tuple(gpt2_shapes(layers=3, width=16, vocabulary=512, context=16)), repeats=2),
    "one-1M": Suite(((1000,),), repeats=2),
    "1000x500": Suite(((5,),) * 200, repeats=2),
}
QUICK_COUNTED_SHAPES = QUICK_SUITES["gpt2-124m"].shapes
# Seconds of a section unless --limit says otherwise. A mode takes some ten; the others compile or measure for minutes.
MODE_LIMIT, LIMIT = 90.0, 300.0
ISSUE = "https://github.com/swd-fused/swd_fused/issues/new?template=gpu_report.yml"


@dataclass(frozen=True)
class Section:
    """`run` yields Results, of which the last counts. Another process imports it by its name."""

    title: str
    run: Callable[[], Iterator[Result]]
    limit: float = LIMIT


def sections(is_quick: bool) -> list[Section]:
    suites = QUICK_SUITES if is_quick else {name: SUITES[name] for name in MEASURED_SUITES}
    elements, repeats = (5120, 2) if is_quick else (64 * 2**20, MOST_REPEATS)
    counted = QUICK_COUNTED_SHAPES if is_quick else COUNTED_SHAPES

    def timed(name: str, suite: Suite) -> Section:
        times = min(suite.repeats, MOST_REPEATS)
        return Section(f"Step times: {name}", partial(gpu_sections.step_times_section, name, suite, times))

    def checked(mode: gpu_modes.Mode) -> Section:
        return Section(f"Mode: {mode.name}", partial(gpu_sections.mode_section, mode.name), MODE_LIMIT)

    return [
        Section("Environment", gpu_sections.environment_section, MODE_LIMIT),
        Section("Kernels", gpu_sections.kernels_section),
        *(checked(mode) for mode in gpu_modes.MODES),
        Section("Launches and waits", partial(gpu_sections.launches_section, counted)),
        Section("Share of the memory's peak rate", partial(gpu_sections.peak_section, elements, repeats)),
        *(timed(name, suite) for name, suite in suites.items()),
    ]


# --- The report


def report_of(outcomes: Mapping[str, Outcome], is_quick: bool, missing: Sequence[str] = ()) -> str:
    parts = ["# GPU report of swd_fused"]
    if is_quick:
        parts.append("Run with --quick: tensors are so small that times say little, whatever their suites' names say.")
    parts.append(
        f"Each section ran in a process of its own. A mode takes {gpu_modes.STEPS} steps beside the torch backend on "
        "the CPU; the largest difference of parameters, state and logged values counts."
    )
    rows = [[title, outcome_text(outcome), f"{outcome.seconds:.0f}"] for title, outcome in outcomes.items()]
    rows += [[title, "not run", ""] for title in missing]
    parts.append(markdown_table(["section", "outcome", "seconds"], rows))
    for title, outcome in outcomes.items():
        text = outcome.value.text if outcome.value else ""
        printed = f"It printed:\n\n```text\n{outcome.printed}\n```" if outcome.printed else ""
        if text or printed:
            parts += filter(None, [f"## {title}", text, printed])
    return "\n\n".join(parts) + "\n"


def outcome_text(outcome: Outcome) -> str:
    problem = problem_of(outcome)
    return f"**problem**: {problem}" if problem else outcome.value.outcome


def problem_of(outcome: Outcome) -> str | None:
    if outcome.problem is not None:
        # Of what it printed the last line names an exception, if that is what has ended it.
        last = outcome.printed.splitlines()[-1:] if "Traceback (most recent" in outcome.printed else []
        return "; ".join([outcome.problem, *last])
    return outcome.value.problem if outcome.value else "ended without a result"


def written(out: Path, outcomes: Mapping[str, Outcome], is_quick: bool, missing: Sequence[str] = ()) -> list[Path]:
    """Writes the report, and beside it what was measured and a picture of that. Returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    results = [outcome.value for outcome in outcomes.values() if outcome.value]
    paths = [out / "gpu_report.md"]
    step_rows = [row for result in results for row in result.step_rows]
    mode_rows = [row for result in results for row in result.mode_rows]
    for name, rows in (("step_time.csv", step_rows), ("modes.csv", mode_rows)):
        if rows:
            write_rows(out / name, rows)
            paths.append(out / name)
    if step_rows and not missing:
        try:
            paths.append(plot_step_time(out / "step_time.csv"))
        except Exception as error:  # the numbers are there all the same
            outcomes = {**outcomes, "Picture": Outcome(Result(traceback_block(error), "was not drawn"), None, "", 0.0)}
    new = paths[0].with_suffix(".new")
    new.write_text(report_of(outcomes, is_quick, missing))
    new.replace(paths[0])
    return paths


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    result.add_argument("--quick", action="store_true", help="small tensors and few repeats: does everything run?")
    result.add_argument(
        "--limit", type=float, metavar="SECONDS", help=f"of each section; default: {MODE_LIMIT:g} or {LIMIT:g}"
    )
    result.add_argument(
        "--out", type=Path, default=Path("results/gpu_report"), metavar="DIR", help="default: %(default)s"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 1 if the report has problems."""
    command = parser()
    options = command.parse_args(arguments)
    if not torch.cuda.is_available():
        command.error(
            f"torch {torch.__version__} finds no CUDA or ROCm GPU here, and the report is about one. Install a torch "
            "for your GPU, or try tests/virtual_gpu/run python -m benchmarks.gpu_report --quick."
        )
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: dict[str, Outcome] = {}
    plan = sections(options.quick)
    with Progress(*columns, console=console, transient=True) as progress, tempfile.TemporaryDirectory() as cache:
        # A cache of its own, or seconds to compile would be those of a look into the user's.
        environment = {} if options.quick else {"TRITON_CACHE_DIR": cache}
        task = progress.add_task("report", total=len(plan))
        for section in plan:
            progress.update(task, description=section.title)
            outcome = watched(section.run, options.limit or section.limit, environment)
            outcomes[section.title] = outcome
            text = f"{section.title}: {escaped(outcome_text(outcome))}, {outcome.seconds:.0f} s"
            progress.console.print(text.replace("**", ""), markup=False, soft_wrap=True)
            progress.advance(task)
            paths = written(options.out, outcomes, options.quick, [s.title for s in plan[len(outcomes) :]])
    console.print(f"Wrote {', '.join(map(str, paths))}", soft_wrap=True)
    console.print(f"Please attach them to {ISSUE}", soft_wrap=True)
    return int(any(problem_of(outcome) is not None for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
