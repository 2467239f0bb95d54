"""Draws the picture of step times from their CSV. Measures nothing."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.conditions import read_rows
from benchmarks.contenders import CLIPPED_PEER, PEER, TORCHAO

Row = dict[str, str]

# Okabe and Ito's palette, which readers with any kind of colour vision can tell apart.
KERNEL_COLOURS = {
    "exact": "#0072B2",
    "lagged": "#56B4E9",
    "exact 8bit": "#009E73",
    "lagged 8bit": "#7FCEB9",
    "exact + clip": "#0072B2",
}
COLOURS = {
    **{f"FusedAdamS {mode} ({kernels})": c for kernels in ("cpu", "triton") for mode, c in KERNEL_COLOURS.items()},
    "FusedAdamS exact (torch)": "#E69F00",
    "FusedAdamS lagged (torch)": "#F0E442",
    "FusedAdamS exact + clip (torch)": "#E69F00",
    TORCHAO: "#D55E00",
    "apex FusedAdam": "#882255",
    "bitsandbytes AdamW8bit": "#332288",
    "flashoptim FlashAdamW": "#117733",
    "AdamW foreach": "#999999",
    "authors' loop": "#CC79A7",
}
PANELS = {
    PEER: "AdamW fused is at 1",
    CLIPPED_PEER: "clip_grad_norm_ + AdamW fused is at 1",
}
OURS = ("(cpu)", "(triton)")  # of kernels, which are drawn full, and the others as rings
ROW = 0.62  # inches
SPREAD = 0.72  # of a row's height, over which its points are spread
CAPTION_WIDTH = 150  # characters, of some 170 that the picture has room for
LEAST_RANGE = 0.75, 1.5  # of the ratios' axis, where all are near 1
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)


def plot(csv_path: Path, picture_path: Path | None = None) -> Path:
    picture_path = picture_path or csv_path.with_suffix(".png")
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    figure_of(read_rows(csv_path)).savefig(picture_path, dpi=160)
    return picture_path


def figure_of(rows: Sequence[Row]) -> Figure:
    panels = {peer: points for peer in PANELS if (points := [row for row in rows if is_compared(row, peer)])}
    suites = max((len(suites_of(points)) for points in panels.values()), default=1)
    figure = Figure(figsize=(11, ROW * suites + 2.6), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False, width_ratios=[1.6, 1][: len(panels)] or None)[0]
    for axis, (peer, points) in zip(axes, panels.items(), strict=False):
        draw_panel(axis, rows, points, PANELS[peer], with_sizes=axis is axes[0])
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(caption(rows), fontsize=7.5, color="#444444", x=0.01, ha="left")
    return figure


def is_compared(row: Row, peer: str) -> bool:
    """The peer itself is the line at 1."""
    return row["peer"] == peer and row["contender"] != peer


def suites_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["suite"] for row in rows))


def draw_panel(axis: Axes, rows: Sequence[Row], points: Sequence[Row], title: str, with_sizes: bool) -> None:
    """Draws a row of points for each suite, on a logarithmic axis."""
    peer_medians = {row["suite"]: float(row["median_s"]) for row in rows if row["contender"] == points[0]["peer"]}
    suites = suites_of(points)
    names = []
    for position, suite in enumerate(suites):
        group = [row for row in points if row["suite"] == suite]
        for index, row in enumerate(group):
            offset = (index / (len(group) - 1) - 0.5) * SPREAD if len(group) > 1 else 0.0
            draw_point(axis, row, position + offset, peer_medians[suite])
        tensors = f"tensors: {count(group[0]['tensors'])}"
        names.append(f"{suite}\n{count(group[0]['elements'])} elements\n{tensors}" if with_sizes else "")
        if position % 2 == 0:
            axis.axhspan(position - 0.5, position + 0.5, color="#f3f3f3", zorder=0)
    axis.set_yticks(range(len(suites)), names, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(suites) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.plot(LEAST_RANGE, (0, 0), linestyle="none")
    axis.xaxis.set_major_locator(FixedLocator(TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.axvline(1, color="black", linewidth=1)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(title, fontsize=9.5, loc="left")
    axis.set_xlabel("time of a step: faster to the left, slower to the right", fontsize=8)


def count(number: str) -> str:
    return f"{int(number):,}" if int(number) < 1e6 else f"{int(number) / 1e6:.2f}M"


def draw_point(axis: Axes, row: Row, position: float, peer_median: float) -> None:
    ratio = float(row["ratio"])
    low, high = float(row["q1_s"]) / peer_median, float(row["q3_s"]) / peer_median
    colour = COLOURS[row["contender"]]
    is_ours = row["contender"].endswith(OURS)
    axis.plot([low, high], [position, position], color=colour, linewidth=1.4, alpha=0.6, zorder=2)
    axis.plot(
        ratio,
        position,
        marker="o",
        markersize=5.5 if is_ours else 4.5,
        markerfacecolor=colour if is_ours else "white",
        markeredgecolor=colour,
        linestyle="none",
        label=row["contender"],
        zorder=3,
    )
    if is_ours:
        text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 6.5}
        axis.annotate(text, (max(high, ratio), position), **place)


def caption(rows: Sequence[Row]) -> str:
    first = rows[0]
    repeats = ", ".join(f"{suite} {n}" for suite, n in {row["suite"]: row["repeats"] for row in rows}.items())
    loads = [float(row["other_load"]) for row in rows if row["other_load"]]
    busy = f"; others used up to {max(loads):.2f} cores" if loads else ""
    place = f"{first['threads']} of {first['cores']} cores, {first['cpu']} (cpu){busy}"
    if first["device"] != "cpu":
        place = first["device"]
    lines = [
        f"Ratio of medians, lines: quartiles. All contenders take turns. {first['dtype']}, {place}.",
        f"torch {first['torch']}, swd_fused {first['swd_fused']}, Python {first['python']}, {first['date'][:10]}. "
        f"Repeats: {repeats}.",
    ]
    return "\n".join(textwrap.fill(line, CAPTION_WIDTH) for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_step_time", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path("results/step_time/step_time.csv"))
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: beside the CSV")
    options = parser.parse_args(arguments)
    print(f"Wrote {plot(options.csv, options.out)}")


if __name__ == "__main__":
    main()
