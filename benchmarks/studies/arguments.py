"""The options that commands of studies share."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.conditions import positive


def parser(name: str, description: str | None, jobs: int, epilog: str | None = None) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        f"python -m benchmarks.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--seeds", type=positive, help="how many; default: 3")
    result.add_argument("--jobs", type=positive, default=jobs, help="runs at a time; default: %(default)s")
    result.add_argument("--quick", action="store_true", help="a few steps of small models, to see that it works")
    result.add_argument("--draw", action="store_true", help="run nothing: show again what the CSV files have")
    out = Path("results") / name
    result.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    return result
