"""Times `optimizer.step()` in training loops with an older version of the package and with this one, turn by turn:
python -m benchmarks.two_versions COMMIT

The older one is taken out of git, renamed, and built, in a minute; it stays in build/.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import swd_fused
from benchmarks.step_times.contenders import MAX_GRAD_NORM, SCHEDULED_WEIGHT_DECAY, Contender
from benchmarks.step_times.harness import Case, Step, carry_out, command, crossed
from benchmarks.training_loops import BUDGET, MODELS, QUICK, REPEATS, Loop

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
    def loop(package: ModuleType) -> Callable[[None], Step]:
        def make(params: Any) -> Any:
            return package.FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY, **OPTIONS[option])

        def build(_: None) -> Step:
            torch.manual_seed(0)
            return Loop(Contender("", "cpu", None, "", make), MODELS[model](), []).turn

        return build

    contenders = {name: loop(package) for name, package in versions.items()}
    columns = {"model": model, "option": option}
    return Case(f"{model}, {option}", columns, contenders, REPEATS, budget=BUDGET, timer=lambda turn: turn())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("two_versions", __doc__)
    parser.add_argument("commit", help="of the older version")
    options = parser.parse_args(arguments)
    versions = {options.commit: older_version(options.commit), "this one": swd_fused}
    cases = [case_of(model, versions, each) for model in (QUICK if options.quick else MODELS) for each in OPTIONS]
    title = f"Time of a step, relative to that of {options.commit}, {options.threads} threads"
    carry_out(
        options,
        cases,
        lambda rows: crossed(
            [row for row in rows if row["contender"] != row["peer"]],
            title,
            lambda row: row["model"],
            lambda row: row["option"],
            lambda row: f"{row['ratio']:.3f}",
        ),
    )


if __name__ == "__main__":
    main()
