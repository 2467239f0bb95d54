"""Draws the picture of steps beside busy neighbours from their CSV. Measures nothing."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.conditions import read_rows

Row = dict[str, str]

# Okabe and Ito's palette, and markers, so that readers with any kind of colour vision can tell lines apart.
STYLES = (("#222222", "o"), ("#0072B2", "s"), ("#E69F00", "^"))


def plot(csv_path: Path, picture_path: Path | None = None) -> Path:
    picture_path = picture_path or csv_path.with_suffix(".png")
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    figure_of(read_rows(csv_path)).savefig(picture_path, dpi=160)
    return picture_path


def figure_of(rows: Sequence[Row]) -> Figure:
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, len(suites), squeeze=False)[0]
    for axis, suite in zip(axes, suites, strict=True):
        draw(axis, [row for row in rows if row["suite"] == suite])
    axes[0].set_ylabel("mean ms of a step", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=8, frameon=False)
    figure.supxlabel(caption(rows), fontsize=7.5, color="#444444", x=0.01, ha="left")
    return figure


def draw(axis: Axes, rows: Sequence[Row]) -> None:
    contenders = dict.fromkeys(row["contender"] for row in rows)
    for contender, (colour, marker) in zip(contenders, STYLES, strict=False):
        points = sorted((int(r["neighbours"]), float(r["mean_ms"])) for r in rows if r["contender"] == contender)
        axis.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.2, label=contender)
    axis.set_yscale("log")
    # Labels at 1, 2 and 5 of each power of ten, since a panel may span less than one.
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(sorted({int(row["neighbours"]) for row in rows}))
    axis.set_xlabel("busy neighbours", fontsize=8)
    axis.set_title(f"{rows[0]['suite']}: {int(rows[0]['elements']):,} elements", fontsize=8, loc="left")
    axis.tick_params(labelsize=8)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def caption(rows: Sequence[Row]) -> str:
    first = rows[0]
    loads = [float(row["other_load"]) for row in rows if row["other_load"]]
    others = f"; others than the neighbours used up to {max(loads):.2f} cores" if loads else ""
    steps = sorted(int(row["steps"]) for row in rows)
    text = (
        "Mean time of a step beside processes that never sleep, optimizers taking turns step by step; scales differ. "
        f"{first['threads']} threads on {first['cores']} cores, {first['cpu']}{others}. torch {first['torch']}, "
        f"swd_fused {first['swd_fused']}, Python {first['python']}, {first['date'][:10]}. "
        f"Steps: {steps[0]:,} to {steps[-1]:,}."
    )
    return textwrap.fill(text, 150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_busy_machine", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path("results/busy_machine/busy_machine.csv"))
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: beside the CSV")
    options = parser.parse_args(arguments)
    print(f"Wrote {plot(options.csv, options.out)}")


if __name__ == "__main__":
    main()
