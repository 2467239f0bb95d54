"""Counts the lines of the package, its tests and benchmarks by folder, and the words of the pages, beside their limits;
and the seconds of the last `make test` here.

python -m tests.shape          prints them
python -m tests.shape --check  fails, too, if one of them is over its limit
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests import seconds

ROOT = Path(__file__).resolve().parent.parent
CODE = {".py", ".c", ".cpp", ".h"}

# What a reader has to carry. Lines are not saved by longer lines or by fewer reasons: ruff holds them to 120
# characters, and comments count as lines because code without its reasons is not smaller.
LIMITS = {
    "swd_fused": 8_300,
    "swd_fused/core": 2_300,
    "tests": 21_000,
    "benchmarks": 6_000,
    "docs": 12_000,
    "make test": 360,  # on two quiet cores, compiled kernels included
    "slowest file": 30,
}

# Asked for when the package's limit had been set, each a file of its own at the edge.
NEWER = ("adamw.py", "averages.py", "outliers.py", "rms_grads.py", "state/other_libraries.py")


def lines_of(top: str) -> Counter[str]:
    """Returns the lines of code of `top` and of each folder directly in it. Files beside these folders count as "."."""
    lines: Counter[str] = Counter()
    for path in (ROOT / top).rglob("*"):
        if path.suffix in CODE and path.is_file():
            inside = path.relative_to(ROOT / top).parts
            folder = f"{top}/{inside[0] if len(inside) > 1 else '.'}"
            lines.update(dict.fromkeys((top, folder), len(path.read_text().splitlines())))
    return lines


def words_of(pages: list[Path]) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def shape() -> list[tuple[str, int]]:
    """Returns what is counted and how many there are, each folder after the one that it is in."""
    counted: list[tuple[str, int]] = []
    for top in ("swd_fused", "csrc", "tests", "benchmarks"):
        counted += sorted(lines_of(top).items())
    counted += [("README.md", words_of([ROOT / "README.md"])), ("docs", words_of(sorted((ROOT / "docs").glob("*.md"))))]
    newer = sum(len((ROOT / "swd_fused" / name).read_text().splitlines()) for name in NEWER)
    counted.insert(1, ("swd_fused/ newer", newer))
    return [*counted, ("docs/notes", words_of(sorted((ROOT / "docs/notes").rglob("*.md"))))]


def last_run() -> list[tuple[str, int]]:
    """Returns the seconds of the last `make test`, and those of its slowest file."""
    parts = [run for run in seconds.runs() if run.name in ("test", "test-compiled")]
    for run in parts:
        print(f"make {run.name}: {run.seconds:.0f} s, slowest {run.slowest[0]}, at a load of {run.load:.1f}")
    if not parts:
        return []
    return [
        ("make test", round(sum(run.seconds for run in parts))),
        ("slowest file", round(max(run.slowest[1] for run in parts))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if something is over its limit")
    arguments = parser.parse_args()
    over = []
    for name, number in [*shape(), *last_run()]:
        limit = LIMITS.get(name)
        unit = "words" if name.startswith(("README", "docs")) else "lines"
        unit = "s" if name in ("make test", "slowest file") else unit
        indent = "  " if "/" in name else ""
        beside = "" if limit is None else f"   at most {limit:,}" + (f", {number - limit:,} over" * (number > limit))
        print(f"{indent + name:26}{number:>8,} {unit}{beside}")
        if limit is not None and number > limit:
            over.append(name)
    if arguments.check and over:
        sys.exit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
