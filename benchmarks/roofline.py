"""What a step would take on a GPU if it did nothing but move its bytes at the memory's peak rate. No GPU is used.

A model, and a bound: no kernel reaches the peak. FusedAdamS's bytes are those that the tests in tests/gpu_code count
while the compiled kernels are executed, AdamW's are those of its operands. Peaks are the vendors' figures.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.conditions import write_rows
from benchmarks.step_times.harness import Row, crossed

OUT = Path("results/roofline/roofline.csv")
PARAMETERS = (124_000_000, 1_000_000_000)
# Terabytes in a second.
PEAKS = {"A100 40GB": 1.555, "A100 80GB SXM": 2.039, "H100 SXM": 3.35, "B200": 8.0, "MI300X": 5.3}
BYTES = {
    ("float32", "AdamW fused"): 28,
    ("float32", "AdamW fused + clip_grad_norm_"): 40,
    ("float32", "FusedAdamS exact, clipping or not"): 32,
    ("float32", "FusedAdamS lagged"): 28,
    ("bfloat16, float32 moments", "FusedAdamS exact, clipping or not"): 24,
    ("bfloat16, float32 moments", "FusedAdamS lagged"): 22,
    ("bfloat16, float32 moments and masters", "FusedAdamS exact, clipping or not"): 28,
}


def modelled() -> list[Row]:
    return [
        {
            "device": device,
            "peak_tb_per_s": peak,
            "parameters": parameters,
            "dtypes": dtypes,
            "step": step,
            "bytes_per_parameter": bytes_each,
            "modelled_ms": round(parameters * bytes_each / peak / 1e9, 4),
        }
        for parameters in PARAMETERS
        for (dtypes, step), bytes_each in BYTES.items()
        for device, peak in PEAKS.items()
    ]


def main() -> None:
    rows = modelled()
    write_rows(OUT, rows)
    title = "Modelled, not measured: milliseconds at the memory's peak rate"

    def step(row: Row) -> str:
        size = f"{row['parameters'] / 1e6:,.0f}M, {row['dtypes']}"
        return f"{size}, {row['step']}: {row['bytes_per_parameter']} bytes"

    Console(width=160).print(crossed(rows, title, step, lambda row: row["device"], lambda r: f"{r['modelled_ms']:.2f}"))
    print(f"Wrote {OUT}")


if __name__ == "__main__":
    main()
