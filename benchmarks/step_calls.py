"""Counts what the host does in a steady step: Python calls, files, and switches between files."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from swd_fused import FusedAdamS

PACKAGE = str(Path(sys.modules["swd_fused"].__file__ or "").parent)
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lagged": {"schedule": "lagged"},
    "clipping": {"max_grad_norm": 1.0},
    "torch backend": {"backend": "torch"},
}


def steady_optimizer(tensors: int, **options: Any) -> FusedAdamS:
    params = [torch.nn.Parameter(torch.ones(10)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = FusedAdamS(params, **options)
    for _ in range(3):
        optimizer.step()
    return optimizer


def count_calls(optimizer: FusedAdamS) -> tuple[Counter[str], int]:
    """Returns the package's Python calls of one step by file, and how often control went from one file to another."""
    files: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(trace)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return Counter(files), sum(before != after for before, after in pairwise(files))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_calls", description=__doc__)
    parser.add_argument("--tensors", type=int, default=1, help="of the model, 10 elements each; default: %(default)s")
    args = parser.parse_args()
    for name, options in SETTINGS.items():
        calls, switches = count_calls(steady_optimizer(args.tensors, **options))
        print(f"{name}: {calls.total()} calls in {len(calls)} files, {switches} switches between files")


if __name__ == "__main__":
    main()
