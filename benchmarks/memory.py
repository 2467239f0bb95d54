"""Bytes for each parameter of a model: the parameter, its gradient and the optimizer's state, measured after a step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import write_rows
from swd_fused import FusedAdamS, __version__

NUMEL = 10**6

CHOICES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("float32", torch.float32, {}),
    ("float32, first moment bfloat16", torch.float32, {"state_dtype": torch.bfloat16}),
    ("float32, amsgrad", torch.float32, {"amsgrad": True}),
    ("bfloat16", torch.bfloat16, {}),
    ("bfloat16, stochastic rounding", torch.bfloat16, {"stochastic_rounding": True}),
    ("bfloat16, master weights", torch.bfloat16, {"master_weights": True}),
    (
        "bfloat16, master weights, first moment bfloat16",
        torch.bfloat16,
        {"master_weights": True, "state_dtype": torch.bfloat16},
    ),
    (
        "bfloat16, stochastic rounding, first moment bfloat16",
        torch.bfloat16,
        {"stochastic_rounding": True, "state_dtype": torch.bfloat16},
    ),
]


def bytes_per_parameter(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, float]:
    param = torch.nn.Parameter(torch.randn(NUMEL).to(dtype))
    param.grad = torch.randn(NUMEL).to(dtype)
    optimizer = FusedAdamS([param], **options)
    optimizer.step()
    state = sum(tensor.untyped_storage().nbytes() for tensor in optimizer.state[param].values())
    sizes = {"parameter": param.nbytes, "gradient": param.grad.nbytes, "state": state}
    sizes["all"] = sum(sizes.values())
    return {name: round(size / NUMEL, 2) for name, size in sizes.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/memory"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    result = Table(title=f"Bytes for each parameter, of {NUMEL:,}", title_justify="left", box=SIMPLE_HEAD)
    result.add_column("choice", no_wrap=True)
    rows = []
    for name, dtype, choice in CHOICES:
        sizes = bytes_per_parameter(dtype, choice)
        if not rows:
            for heading in sizes:
                result.add_column(heading, justify="right")
        result.add_row(name, *(f"{size:g}" for size in sizes.values()))
        rows.append({"choice": name, **sizes, "swd_fused": __version__, "torch": torch.__version__})
    console = Console()
    console.print(result)
    path = options.out / "memory.csv"
    write_rows(path, rows)
    console.print(f"Wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
