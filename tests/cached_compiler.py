"""Compiles as g++ does, but takes the object of an earlier run where a source and its own headers are the same.

For tests.mutants, where most files of a build are those of the build before: CXX="python tests/cached_compiler.py".
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("SWD_FUSED_OBJECTS", "build/objects"))


def texts(source: Path, seen: dict[Path, str]) -> dict[Path, str]:
    """Returns a file and what it includes in quotes, directly or not."""
    if source not in seen:
        seen[source] = source.read_text()
        for name in re.findall(r'^#include "(.+)"', seen[source], re.MULTILINE):
            texts((source.parent / name).resolve(), seen)
    return seen


def main(arguments: list[str]) -> int:
    command = ["g++", *arguments]
    if "-c" not in arguments:
        return subprocess.run(command, check=False).returncode
    source, target = (arguments[arguments.index(option) + 1] for option in ("-c", "-o"))
    parts = [*arguments, *(text for _, text in sorted(texts(Path(source).resolve(), {}).items()))]
    kept = CACHE / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if not kept.exists():
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, kept)
    shutil.copy(kept, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
