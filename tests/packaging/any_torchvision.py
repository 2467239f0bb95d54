"""Makes timm importable beside any torch: torchvision's Python, without operators that were built for another torch.

As a script it runs another one in such a process:

    python any_torchvision.py SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from functools import cache
from pathlib import Path

import torch

# Where `make frameworks` puts what other frameworks would not bear beside them: timm with torchvision.
FOLDER = Path(sys.prefix) / "apart"


@cache  # operators can be declared once only
def prepare() -> None:
    """Adds the folder to where modules are found, and declares operators without which torchvision is not imported."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is None or torchvision.origin is None or "torchvision" in sys.modules:
        return
    library = next(Path(torchvision.origin).parent.glob("_C*.so"))
    try:
        torch.ops.load_library(library)
    except OSError:  # a CUDA build beside a CPU build of torch
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def main() -> None:
    prepare()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
