"""Draws training with moments in 8 bits from its CSV files: loss above, below it what is stored. Measures nothing.

Lines are means over seeds, bands reach from the lowest seed to the highest.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.conditions import read_rows
from benchmarks.eight_bit_contenders import ADAMS, ADAMW, CONTENDERS, EIGHT_BIT, MOVED

Row = dict[str, str]

# Okabe and Ito's palette, which readers with any kind of colour vision can tell apart.
COLOURS = dict(
    zip(
        (contender.name for contender in CONTENDERS),
        (
            "#000000",
            "#0072B2",
            "#BBBBBB",
            "#E69F00",
            "#777777",
            "#CC79A7",
            "#D55E00",
            "#56B4E9",
            "#009E73",
            "#F0E442",
            "#882255",
        ),
        strict=True,
    )
)
DASHED = (ADAMS, ADAMW, MOVED)
NAMES = {"cnn": "Convolutional net, digits with noise", "gpt": "GPT, characters of Python's library"}


def plot(csv_path: Path, picture_path: Path | None = None) -> Path:
    rows = read_rows(csv_path)
    points = read_rows(csv_path.with_name(csv_path.stem + "_curves.csv"))
    picture_path = picture_path or csv_path.with_suffix(".png")
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(5.2 * len(tasks) + 0.8, 7.2), layout="constrained")
    panels = figure.subplots(2, len(tasks), squeeze=False, sharex="col")
    for column, task in enumerate(tasks):
        first = next(row for row in rows if row["task"] == task)
        own = [point for point in points if point["task"] == task]
        loss, stored = panels[0, column], panels[1, column]
        draw(loss, own, "train_loss")
        draw(stored, own, "sum_of_v", percent=True)
        loss.set_yscale("log")
        loss.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        loss.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        loss.set_title(f"{NAMES[task]}, {int(first['parameters']):,} parameters", fontsize=10, loc="left")
        stored.set_xlabel("step")
    panels[0, 0].set_ylabel("training loss")
    panels[1, 0].set_ylabel("sum of stored v against float32's\nfor the same gradients, %")
    by_label: dict[str, Artist] = {}
    for panel in panels[0]:
        handles, labels = panel.get_legend_handles_labels()
        by_label.update(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper left", ncols=3, fontsize=8, frameon=False)
    figure.supxlabel(caption(rows), fontsize=7.5, color="#444444", x=0.01, ha="left")
    figure.savefig(picture_path, dpi=160)
    return picture_path


def draw(axis: Axes, points: Sequence[Row], value: str, percent: bool = False) -> None:
    for name in dict.fromkeys(point["contender"] for point in points):
        own = [point for point in points if point["contender"] == name]
        steps = sorted({int(point["step"]) for point in own})
        values = np.array([[float(p[value]) for p in own if int(p["step"]) == step] for step in steps])
        values = values * 100 if percent else values
        style = {"color": COLOURS[name], "linestyle": "--" if name in DASHED else "-"}
        width = 2 if name == EIGHT_BIT else 1.2
        axis.plot(steps, values.mean(1), label=name, linewidth=width, zorder=3 if name == EIGHT_BIT else 2, **style)
        axis.fill_between(steps, values.min(1), values.max(1), color=COLOURS[name], alpha=0.12, linewidth=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def caption(rows: Sequence[Row]) -> str:
    first = rows[0]
    runs = Counter((row["task"], row["contender"]) for row in rows)
    exception = " (one where there is no band)" if min(runs.values()) == 1 else ""
    return (
        f"Mean of {max(runs.values())} seeds{exception}, bands from the lowest to the highest. Same weights and "
        "batches for all of a seed. Same hyper-parameters.\nAdamS: scheduled weight decay, AdamW: constant. float32 "
        "parameters on the CPU, "
        f"{first['cpu']}. torch {first['torch']}, swd_fused {first['swd_fused']}, Python {first['python']}, "
        f"{first['date'][:10]}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_eight_bit_training", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path("results/eight_bit_training/eight_bit_training.csv"))
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: beside the CSV")
    options = parser.parse_args(arguments)
    print(f"Wrote {plot(options.csv, options.out)}")


if __name__ == "__main__":
    main()
