"""Draws the memory of training steps from its CSV. Measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.conditions import read_rows

# Okabe and Ito's palette, which readers with any kind of colour vision can tell apart.
PARTS = (("parameters", "#0072B2"), ("state", "#56B4E9"), ("gradients", "#E69F00"))
REST = "#cccccc"


def plot(csv_path: Path, picture_path: Path | None = None) -> Path:
    rows = read_rows(csv_path)
    picture_path = picture_path or csv_path.with_suffix(".png")
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 1.3 + 0.32 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for position, row in enumerate(rows):
        elements, left = int(row["elements"]), 0.0
        for name, colour in PARTS:
            width = int(row[name]) / elements
            axis.barh(position, width, left=left, color=colour, label=name if position == 0 else None)
            left += width
        peak = int(row["peak"]) / elements
        label = "activations, temporaries" if position == 0 else None
        axis.barh(position, max(0.0, peak - left), left=left, color=REST, label=label)
        axis.text(max(peak, left) + 0.1, position, f"{peak:.1f}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["setting"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    first = rows[0]
    figure.supxlabel(
        f"Bytes for each of {int(first['elements']):,} parameters at the peak of a training step, {first['model']}, "
        f"{first['tokens']} tokens, on the CPU. Gradients: the most that are alive at once.\n"
        f"torch {first['torch']}, swd_fused {first['swd_fused']}, Python {first['python']}, "
        f"{first['date'][:10]}, {first['threads']} threads.",
        fontsize=7.5,
        color="#444444",
        x=0.01,
        ha="left",
    )
    figure.savefig(picture_path, dpi=160)
    return picture_path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_training_memory", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path("results/memory/training_memory.csv"))
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: beside the CSV")
    options = parser.parse_args(arguments)
    print(f"Wrote {plot(options.csv, options.out)}")


if __name__ == "__main__":
    main()
