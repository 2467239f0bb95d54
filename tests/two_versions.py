"""Times `optimizer.step()` in training loops with an older version of the package and with this one, turn by turn. The
older one is taken out of git, renamed, and built, in a minute; it stays in build/.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

import swd_fused
from benchmarks import training_loops
from benchmarks.step_times.contenders import MAX_GRAD_NORM, SCHEDULED_WEIGHT_DECAY, Contender
from benchmarks.step_times.harness import Case, Row, carry_out, command, crossed
from benchmarks.training_loops import MODELS, QUICK

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, dict[str, Any]] = {"exact": {}, "clip": {"max_grad_norm": MAX_GRAD_NORM}}


def older_version(commit: str) -> ModuleType:
    """Returns the package of a commit under another name, its operators' library included."""
    folder, name = ROOT / "build" / f"version-{commit}", "swd_older"
    if not list(folder.glob(f"{name}/*.so")):
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, "swd_fused", "csrc", "setup.py", "pyproject.toml", "README.md"],
            check=True,
            capture_output=True,
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
        (folder / "swd_fused").rename(folder / name)
        for path in (*folder.rglob("*.py"), *folder.rglob("*.cpp"), *folder.rglob("*.h"), folder / "pyproject.toml"):
            path.write_text(path.read_text().replace("swd_fused", name))
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, check=True)
    sys.path.insert(0, str(folder))
    return import_module(name)


def case_of(model: str, versions: dict[str, ModuleType], option: str) -> Case:
    peer = next(iter(versions))

    def contender(name: str) -> Contender:
        options = {"weight_decay": SCHEDULED_WEIGHT_DECAY, **OPTIONS[option]}
        return Contender(name, "cpu", None, peer, lambda params: versions[name].FusedAdamS(params, **options))

    case = training_loops.case_of(model, [contender(name) for name in versions])
    return replace(case, title=f"{model}, {option}", columns={**case.columns, "option": option})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("two_versions", __doc__)
    parser.prog = "python -m tests.two_versions"
    parser.add_argument("commit", help="of the older version")
    options = parser.parse_args(arguments)
    versions = {options.commit: older_version(options.commit), "this one": swd_fused}
    cases = [case_of(model, versions, each) for model in (QUICK if options.quick else MODELS) for each in OPTIONS]
    title = f"Time of a step, relative to that of {options.commit}, {options.threads} threads"

    def summary(rows: Sequence[Row]) -> Table:
        own = [row for row in rows if row["contender"] != row["peer"]]
        return crossed(own, title, "model", "option", lambda row: f"{row['ratio']:.3f}")

    carry_out(options, cases, summary)


if __name__ == "__main__":
    main()
