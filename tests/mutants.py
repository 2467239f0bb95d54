"""Puts faults into the package, one at a time, and sees whether the tests notice: python -m tests.mutants [--only NAME]

Each mutant is a plausible mistake in one place. It is put into a copy of the tree, C++ is compiled anew, and the tests
that should fail are run as `make test` runs them. Survivors, and mutants whose place has changed, make the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BACKENDS = {"swd_fused/backends/triton": "triton", "swd_fused/backends/torch": "torch", "csrc/": "cpu"}
COMPILER = f"{sys.executable} tests/cached_compiler.py"

# Files of tests by the names that the table has for them. The backends follow from the mutant's file.
FILES = {
    "EDGES": "tests/core/test_edge_cases.py",
    "DEFINITION": "tests/core/test_definition.py",
    "SCALING": "tests/core/test_loss_scaling.py",
    "MASTERS": "tests/core/test_masters.py",
    "EIGHT_BIT": "tests/core/test_eight_bit.py",
    "HOST": "tests/backends/test_triton_backend.py",
    "SCHEDULE": "tests/core/test_schedule.py",
    "KINDS": "tests/core/test_decay_kinds.py",
    "RESUMING": "tests/core/test_reproducibility.py",
    "NUMBERS": "tests/core/test_element_numbers.py",
    "ROUNDING": "tests/core/test_mixed_precision.py",
    "CODES": "tests/backends/test_triton_eight_bit.py",
    "COMPILED": "tests/gpu_code/test_emulated_kernels.py",
    "COMPILED_CODES": "tests/gpu_code/test_emulated_codes.py",
}


class Mutant(NamedTuple):
    file: str
    name: str
    old: str
    new: str
    tests: list[str]


def mutants() -> list[Mutant]:
    """Reads the table beside this file."""
    blocks = Path(__file__).with_suffix(".txt").read_text().split("\n\n")[1:]
    return [_mutant(block.strip().split("\n")) for block in blocks]


def _mutant(lines: list[str]) -> Mutant:
    file, _, name = lines[0].partition(": ")
    old, new = ("\n".join(line[2:] for line in lines[1:] if line[0] == mark) for mark in "-+")
    tests = [word.partition("::") for word in lines[-1][2:].split()]
    return Mutant(file, name, old, new, ["".join((FILES.get(path, path), *test)) for path, *test in tests])


class Tree:
    """A copy of the sources, in which one mutant after another is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.splitlines():
            if name.split("/")[0] in ("csrc", "docs", "swd_fused", "tests") or "/" not in name:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        for built in (ROOT / "swd_fused").glob("*.so"):
            shutil.copy(built, folder / "swd_fused")
        self.built = [(path, path.read_bytes()) for path in (folder / "swd_fused").glob("*.so")]

    def problem(self, mutant: Mutant) -> str | None:
        """Returns why a mutant survives or cannot be tried. None if a test fails that passes without it."""
        path = self.folder / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"ERROR, the text to replace is there {text.count(mutant.old)} times"
        if self.tested(mutant):
            return "ERROR, its tests fail without it"
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            is_cpp = mutant.file.startswith("csrc/")
            if is_cpp and self.run("setup.py", "-q", "build_ext", "--inplace", "--force", CXX=COMPILER):
                return "ERROR, it does not compile"
            code = self.tested(mutant)
            if code < 0:  # the tests have crashed, for instance by a write to memory that was freed
                return None
            return {0: "SURVIVED", 1: None}.get(code, f"ERROR, pytest ended with {code}")
        finally:
            path.write_text(text)
            for built, content in self.built:
                built.unlink(missing_ok=True)  # a program that runs keeps its file
                built.write_bytes(content)

    def tested(self, mutant: Mutant) -> int:
        backend = next((name for start, name in BACKENDS.items() if mutant.file.startswith(start)), "torch,cpu")
        compiled = any("gpu_code" in path for path in mutant.tests)
        variables = {"SWD_FUSED_TEST_BACKENDS": backend, "TRITON_INTERPRET": str(int(not compiled))}
        return self.run("-m", "pytest", "-x", "-q", "-m", "not slow", *mutant.tests, **variables)

    def run(self, *arguments: str, **variables: str) -> int:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), **variables}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, check=False).returncode


def tried(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str | None]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for job in range(jobs):
            trees.put(Tree(Path(folder, str(job))))

        def attempt(mutant: Mutant) -> str | None:
            tree = trees.get()
            try:
                return tree.problem(mutant)
            finally:
                trees.put(tree)

        yield from zip(mutants, pool.map(attempt, mutants), strict=True)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="those whose name or file contains this")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if options.only in mutant.name or options.only in mutant.file]
    wrong = 0
    for mutant, problem in tried(chosen, options.jobs):
        wrong += problem is not None
        print(f"{problem or 'killed'}: {mutant.name} ({mutant.file})", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants killed")
    return int(wrong > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
