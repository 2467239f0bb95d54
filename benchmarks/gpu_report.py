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

from benchmarks import gpu, gpu_modes, gpu_sections
from benchmarks.conditions import write_rows
from benchmarks.gpu_sections import Result, escaped, markdown_table
from benchmarks.step_times.pictures import plot_step_time
from benchmarks.step_times.suites import QUICK_SUITES, SUITES, Suite, gpt2_shapes
from benchmarks.watched_process import Outcome, watched

MOST_REPEATS = 31
MEASURED_SUITES = ("one-64M", "gpt2-124m", "one-1M", "1000x500")
COUNTED_SHAPES = tuple(gpt2_shapes(layers=12, width=64, vocabulary=1000, context=64))
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
    suites = {name: (QUICK_SUITES if is_quick else SUITES)[name] for name in MEASURED_SUITES}
    elements, repeats = (5120, 2) if is_quick else (64 * 2**20, MOST_REPEATS)
    counted = QUICK_SUITES["gpt2-124m"].shapes if is_quick else COUNTED_SHAPES

    def timed(name: str, suite: Suite) -> Section:
        suite = Suite(suite.shapes, min(suite.repeats, MOST_REPEATS))
        return Section(f"Step times: {name}", partial(gpu_sections.step_times_section, name, suite))

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
    """Writes the report, and beside it what was measured. Returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    rows: dict[Path, list[gpu_sections.Row]] = {}
    for outcome in outcomes.values():
        for name, own in (outcome.value.rows if outcome.value else {}).items():
            rows.setdefault(out / name, []).extend(own)
    for path, found in rows.items():
        write_rows(path, found)
    report = out / "gpu_report.md"
    new = report.with_suffix(".new")
    new.write_text(report_of(outcomes, is_quick, missing))
    new.replace(report)
    return [report, *rows]


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
    outcomes: dict[str, Outcome] = {}
    plan = sections(options.quick)
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own, or seconds to compile would be those of a look into the user's.
        environment = {} if options.quick else {"TRITON_CACHE_DIR": cache}
        for place, section in enumerate(plan):
            print(f"{place + 1} of {len(plan)}, {section.title}: ", end="", flush=True)
            outcome = watched(section.run, options.limit or section.limit, environment)
            outcomes[section.title] = outcome
            print(f"{escaped(outcome_text(outcome)).replace('**', '')}, {outcome.seconds:.0f} s", flush=True)
            paths = written(options.out, outcomes, options.quick, [s.title for s in plan[place + 1 :]])
    if (times := options.out / "step_time.csv") in paths:
        paths.append(plot_step_time(times))
    print(f"Wrote {', '.join(map(str, paths))}\nPlease attach them to {ISSUE}")
    return int(any(problem_of(outcome) is not None for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
