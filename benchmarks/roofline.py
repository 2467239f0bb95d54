"""What a step would take on a GPU if it did nothing but move its bytes at the memory's peak rate. No GPU is used.

A model, and a bound: no kernel reaches the peak. FusedAdamS's bytes are those that the tests in tests/gpu_code count
while the compiled kernels are executed, AdamW's are those of its operands. Peaks are the vendors' figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import write_rows

RESULTS = Path(__file__).parent / "results" / "roofline.csv"

# Terabytes in a second.
PEAKS = {"A100 40GB": 1.555, "A100 80GB SXM": 2.039, "H100 SXM": 3.35, "B200": 8.0, "MI300X": 5.3}


class Step(NamedTuple):
    dtypes: str
    name: str
    bytes: int  # for each parameter


STEPS = (
    Step("float32", "AdamW fused", 28),
    Step("float32", "AdamW fused + clip_grad_norm_", 40),
    Step("float32", "FusedAdamS exact, clipping or not", 32),
    Step("float32", "FusedAdamS lagged", 28),
    Step("bfloat16, float32 moments", "FusedAdamS exact, clipping or not", 24),
    Step("bfloat16, float32 moments", "FusedAdamS lagged", 22),
    Step("bfloat16, float32 moments and masters", "FusedAdamS exact, clipping or not", 30),
)


def milliseconds(parameters: float, bytes_each: int, terabytes_per_second: float) -> float:
    return parameters * bytes_each / terabytes_per_second / 1e9


def modelled(parameters: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "device": device,
            "peak_tb_per_s": peak,
            "parameters": int(count),
            "dtypes": step.dtypes,
            "step": step.name,
            "bytes_per_parameter": step.bytes,
            "modelled_ms": round(milliseconds(count, step.bytes, peak), 4),
        }
        for count in parameters
        for step in STEPS
        for device, peak in PEAKS.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    title = "Modelled, not measured: milliseconds at the memory's peak rate"
    result = Table("parameters", "dtypes", "step", "bytes each", *PEAKS, box=SIMPLE_HEAD, title=title)
    for first in range(0, len(rows), len(PEAKS)):
        row = rows[first]
        times = [f"{row['modelled_ms']:.2f}" for row in rows[first : first + len(PEAKS)]]
        size = f"{row['parameters'] / 1e6:,.0f}M"
        result.add_row(size, row["dtypes"], row["step"], str(row["bytes_per_parameter"]), *times)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument(
        "--parameters", type=float, nargs="+", default=[124e6, 1e9], help="sizes of models (default: 124e6 1e9)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV to write")
    options = parser.parse_args(arguments)
    rows = modelled(options.parameters)
    write_rows(options.out, rows)
    Console(width=160).print(table(rows))


if __name__ == "__main__":
    main()
