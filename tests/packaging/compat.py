"""Installs a wheel beside other versions of torch and Python, and runs the self-test in each. Use: make compat

Each torch is tried with one Python, and each Python with one torch at least; --every-pair tries all. A torch from PyPI
is 0.5 to 0.9 GB to download, and is deleted when it has been tried. Its CUDA packages, gigabytes more, are left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.packaging import cuda_stand_ins

TORCHES = ["2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# Of torch, without CUDA and Triton.
DEPENDENCIES = ["filelock", "fsspec", "jinja2", "networkx", "numpy", "setuptools", "sympy", "typing_extensions"]


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def interpreter(version: str) -> Path | None:
    """Returns a Python of this version: this one, one on the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        found = run(candidate, "-c", "import sys, venv; print('{}.{}'.format(*sys.version_info))")
        if found.stdout.strip() == version:
            return Path(candidate)
    return None


def pairs(torches: list[str], pythons: list[str], every: bool) -> Iterator[tuple[str, str]]:
    """Yields what to try, the oldest torch with the oldest Python and the newest with the newest."""
    if every:
        yield from itertools.product(torches, pythons)
        return
    for i in range(max(len(torches), len(pythons))):
        yield torches[min(i, len(torches) - 1)], pythons[min(i, len(pythons) - 1)]


def attempt(wheel: Path, torch: str, python: Path) -> str:
    """Returns "ok", or what went wrong, for one environment, which is deleted afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        run(python, "-m", "venv", directory)
        pip = [Path(directory, "bin", "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        if run(*pip, "--no-cache-dir", "--no-deps", f"torch=={torch}").returncode:
            return "not available: the registry has no such torch for this Python"
        for packages in (DEPENDENCIES, ["--no-deps", wheel]):
            installed = run(*pip, *packages)
            if installed.returncode:
                return f"FAILED to install: {installed.stderr}"
        (libraries,) = Path(directory).glob("lib/python3*/site-packages/torch/lib")
        cuda_stand_ins.install(libraries)
        tested = run(pip[0], "-m", "swd_fused", cwd=directory)
        if tested.returncode or "cpu    on cpu: ok" not in tested.stdout:
            return f"FAILED\n{tested.stdout}{tested.stderr}"
        return "ok"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.packaging.compat", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", action="append", help="a version; may be repeated; default: 2.10 to 2.15")
    parser.add_argument("--python", action="append", help="a version; may be repeated; default: 3.10 to 3.13")
    parser.add_argument("--every-pair", action="store_true", help="each torch with each Python: 13 GB of downloads")
    options = parser.parse_args()
    pythons = {version: interpreter(version) for version in options.python or PYTHONS}
    for version, found in pythons.items():
        if found is None:
            print(f"Python {version}: not available on this machine")
    present = [version for version, found in pythons.items() if found is not None]
    outcomes = []
    for torch, version in pairs(options.torch or TORCHES, present, options.every_pair):
        python = pythons[version]
        assert python is not None
        outcomes.append(attempt(options.wheel.absolute(), torch, python))
        print(f"torch {torch}, Python {version}: {outcomes[-1]}", flush=True)
    return int(any(outcome.startswith("FAILED") for outcome in outcomes) or "ok" not in outcomes)


if __name__ == "__main__":
    sys.exit(main())
