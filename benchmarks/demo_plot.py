"""Draws the demo's picture from its CSV: gradient norm above, weight decay below. Measures nothing."""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot a figure draws with Agg, on machines without a display too

# From Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = {"AdamW": "#D55E00", "FusedAdamS": "#0072B2"}
INK = "#333333"
GREY = "#777777"

Columns = dict[str, np.ndarray]


def read_steps(path: Path) -> dict[str, Columns]:
    rows_of = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows_of[row["optimizer"]].append(row)
    names = ("step", "epoch", "lr", "grad_norm", "weight_decay")
    return {
        optimizer: {name: np.array([float(row[name]) for row in rows]) for name in names}
        for optimizer, rows in rows_of.items()
    }


def epochs_at_steps(steps: Columns) -> np.ndarray:
    return steps["step"] * steps["epoch"][-1] / steps["step"][-1]


def epoch_means(epoch: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The middle of each epoch and the mean over it."""
    epochs = np.unique(epoch)
    return epochs - 0.5, np.array([values[epoch == each].mean() for each in epochs])


def draw_grad_norm(axes: Axes, runs: dict[str, Columns]) -> None:
    for name, steps in runs.items():
        axes.plot(epochs_at_steps(steps), steps["grad_norm"], color=COLOURS[name], linewidth=0.5, alpha=0.22)
    for name, steps in runs.items():
        middles, means = epoch_means(steps["epoch"], steps["grad_norm"])
        axes.plot(middles, means, color=COLOURS[name], linewidth=2, marker="o" if len(means) == 1 else None, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("gradient norm")
    axes.legend(frameon=False, loc="upper right", labelcolor="linecolor", handlelength=1.4)


def draw_weight_decay(axes: Axes, runs: dict[str, Columns]) -> None:
    for name, steps in runs.items():
        axes.plot(epochs_at_steps(steps), steps["weight_decay"], color=COLOURS[name], linewidth=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("weight decay,\nin AdamW's terms")
    axes.set_xlabel("epoch")


def mark_milestones(panels: Sequence[Axes], steps: Columns) -> None:
    drops = np.flatnonzero(np.diff(steps["lr"]))
    for epoch in epochs_at_steps(steps)[drops]:
        for axes in panels:
            axes.axvline(epoch, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
        above = panels[0].get_xaxis_transform()
        panels[0].text(epoch, 1.02, "lr / 10", transform=above, ha="center", color=GREY, fontsize=9)


def draw(table: Path, picture: Path) -> None:
    runs = read_steps(table)
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    draw_grad_norm(panels[0], runs)
    draw_weight_decay(panels[1], runs)
    steps = runs["FusedAdamS"]
    mark_milestones(panels, steps)
    panels[1].set_xlim(0, steps["epoch"][-1])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(
        "FusedAdamS decays weights more as gradients shrink, AdamW always the same",
        fontsize=11.5,
        fontweight="bold",
        color=INK,
    )
    figure.supxlabel(
        "Convolutional net on scikit-learn's digits. Gradient norm: each step thin, mean of each epoch thick.",
        fontsize=8.5,
        color=GREY,
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=160)


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
