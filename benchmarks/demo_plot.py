"""Draws the demo's picture from its CSV: what FusedAdamS's schedule does, and not who trains better. Measures nothing.

Above are the gradients, below the weight decay that follows from them, beside the constant one with the same total.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot a figure draws with Agg, on machines without a display too

# From Okabe and Ito's palette, which the colour-blind can tell apart.
BLUE = "#0072B2"
ORANGE = "#D55E00"
INK = "#333333"
GREY = "#777777"

Columns = dict[str, np.ndarray]


def read_steps(path: Path) -> Columns:
    """Returns the columns of FusedAdamS's rows."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["optimizer"] == "FusedAdamS"]
    names = ("step", "epoch", "lr", "grad_norm", "rms_grad", "weight_decay", "parameters")
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


def epochs_at_steps(steps: Columns) -> np.ndarray:
    return steps["step"] * steps["epoch"][-1] / steps["step"][-1]


def draw_gradients(axes: Axes, steps: Columns) -> None:
    epochs = epochs_at_steps(steps)
    of_step = steps["grad_norm"] / np.sqrt(steps["parameters"])
    axes.plot(epochs, of_step, color=BLUE, linewidth=0.5, alpha=0.35, label="of each step")
    axes.plot(epochs, steps["rms_grad"], color=BLUE, linewidth=2, label="running average,\nwhich divides the decay")
    axes.set_yscale("log")
    axes.set_ylabel("rms gradient")
    legend_beside(axes)


def draw_weight_decay(axes: Axes, steps: Columns) -> None:
    epochs = epochs_at_steps(steps)
    constant = np.average(steps["weight_decay"], weights=steps["lr"])
    axes.plot(epochs, steps["weight_decay"], color=BLUE, linewidth=2, label="AdamS")
    axes.axhline(constant, color=ORANGE, linewidth=2, label=f"AdamW with the same\ntotal decay ({constant:.2g})")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("weight decay,\nin AdamW's terms")
    axes.set_xlabel("epoch")
    legend_beside(axes)


def legend_beside(axes: Axes) -> None:
    """Puts the legend to the right of the panel: within it there is no place that the curves of all runs leave free."""
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.4, fontsize=9)


def mark_milestones(panels: Sequence[Axes], steps: Columns) -> None:
    drops = np.flatnonzero(np.diff(steps["lr"]))
    for epoch in epochs_at_steps(steps)[drops]:
        for axes in panels:
            axes.axvline(epoch, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
        above = panels[0].get_xaxis_transform()
        panels[0].text(epoch, 1.02, "lr / 10", transform=above, ha="center", color=GREY, fontsize=9)


def figure_of(steps: Columns) -> Figure:
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    draw_gradients(panels[0], steps)
    draw_weight_decay(panels[1], steps)
    mark_milestones(panels, steps)
    panels[1].set_xlim(0, steps["epoch"][-1])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(
        "AdamS: the weight decay grows as the gradients shrink",
        fontsize=11.5,
        fontweight="bold",
        color=INK,
    )
    figure.supxlabel(
        "A small convolutional net on scikit-learn's digits: python -m benchmarks.demo",
        fontsize=8.5,
        color=GREY,
    )
    return figure


def draw(table: Path, picture: Path) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure_of(read_steps(table)).savefig(picture, dpi=160)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_plot",
        description="Draws the picture of the demo again, from the CSV file that python -m benchmarks.demo wrote.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--table", type=Path, default=Path("results/demo/steps.csv"), metavar="CSV", help="what to draw"
    )
    parser.add_argument("--picture", type=Path, default=Path("results/demo/demo.png"), metavar="PNG", help="where to")
    args = parser.parse_args(argv)
    draw(args.table, args.picture)
    print(f"The picture: {args.picture}")


if __name__ == "__main__":
    main()
