"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write` is given another path, from which the file is moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    write(partial)
    os.replace(partial, path)
