"""Draws the pictures of step times from their CSV files. Nothing here measures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.conditions import read_rows
from benchmarks.drawing import PALETTE, legend_above, measured_on, save, tidy, unique
from benchmarks.step_times.contenders import ALL_REDUCE, PEER

Row = dict[str, str]

# --- Ratios by suite

COLOURS = {
    "FusedAdamS exact": PALETTE["blue"],
    "FusedAdamS lagged": PALETTE["sky"],
    "FusedAdamS exact 8bit": PALETTE["green"],
    "FusedAdamS lagged 8bit": "#7FCEB9",
    "FusedAdamS exact + clip": PALETTE["blue"],
    "FusedAdamS exact + clip + outliers": PALETTE["pink"],
    "FusedAdamW": PALETTE["red"],
    "FusedAdamW + clip": PALETTE["red"],
    "FusedAdamW + clip + average": PALETTE["green"],
}
OTHERS = ("#999999", PALETTE["orange"], PALETTE["pink"], PALETTE["red"], PALETTE["yellow"], "#882255", "#332288")
OURS = ("(cpu)", "(triton)")  # of kernels, which are drawn full, and the others as rings
ROW = 0.62  # inches
SPREAD = 0.72  # of a row's height, over which its points are spread
LEAST_RANGE = 0.75, 1.5  # of the ratios' axis, where all are near 1
TICKS = (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)


def plot_ratios(path: Path, picture: Path | None = None, *, note: str) -> Path:
    """Draws a panel for each contender that others are compared with, and in it a row for each suite."""
    rows = read_rows(path)
    ranks = {row["ranks"] for row in rows if "ranks" in row}
    for row in rows:
        beside = f" on {row['ranks']} ranks" if len(ranks) > 1 else ""
        size = f"{count(row['elements'])} elements\ntensors: {count(row['tensors'])}"
        row["label"] = f"{row['suite']}{beside}\n{size}"
    points = [row for row in rows if row["contender"] not in (row["peer"], ALL_REDUCE)]
    panels = {peer: [row for row in points if row["peer"] == peer] for peer in unique(points, "peer")} or {PEER: []}
    suites = max(len(unique(own, "label")) for own in panels.values())
    figure = Figure(figsize=(11, ROW * suites + 2.6), layout="constrained")
    widths = [1.6 if peer == PEER else 1 for peer in panels]
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    colours = colours_of(unique(points, "contender"))
    for axis, (peer, own) in zip(axes, panels.items(), strict=True):
        medians = {row["label"]: float(row["median_s"]) for row in rows if row["contender"] == peer}
        draw_ratios(axis, own, medians, colours, with_names=axis is axes[0])
        axis.set_title(f"{peer.replace(' + ', chr(10) + '+ ')} = 1", fontsize=9, loc="left")
    legend_above(figure, axes, columns=4)
    repeats = ", ".join(f"{label.splitlines()[0]} {n}" for label, n in {r["label"]: r["repeats"] for r in rows}.items())
    note = f"Ratio of medians, lines: quartiles. {note} float32. Repeats: {repeats}."
    return save(figure, picture or path.with_suffix(".png"), f"{note} {measured_on(rows)}")


plot_step_time = partial(plot_ratios, note="All contenders take turns.")
plot_sharded_step = partial(plot_ratios, note="Time of the slowest rank. FSDP2, gloo on loopback, one thread a rank.")


def colours_of(contenders: Sequence[str]) -> dict[str, str]:
    others = cycle(OTHERS)
    kernels = {name: name.partition(" (")[0] for name in contenders if name.endswith(OURS)}
    return {name: COLOURS[kernels[name]] if kernels.get(name) in COLOURS else next(others) for name in contenders}


def draw_ratios(
    axis: Axes, points: Sequence[Row], medians: dict[str, float], colours: dict[str, str], with_names: bool
) -> None:
    """Draws a row of points for each suite, on a logarithmic axis."""
    labels = unique(points, "label")
    for position, label in enumerate(labels):
        group = [row for row in points if row["label"] == label]
        for index, row in enumerate(group):
            offset = (index / (len(group) - 1) - 0.5) * SPREAD if len(group) > 1 else 0.0
            draw_ratio(axis, row, position + offset, medians[label], colours[row["contender"]])
        if position % 2 == 0:
            axis.axhspan(position - 0.5, position + 0.5, color="#f3f3f3", zorder=0)
    tidy(axis, "x")
    axis.set_yticks(range(len(labels)), labels if with_names else [""] * len(labels), fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.plot(LEAST_RANGE, (0, 0), linestyle="none")
    axis.xaxis.set_major_locator(FixedLocator(TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:g}")
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlabel("time of a step, less is faster", fontsize=8)


def draw_ratio(axis: Axes, row: Row, position: float, peer_median: float, colour: str) -> None:
    ratio, low, high = float(row["ratio"]), float(row["q1_s"]) / peer_median, float(row["q3_s"]) / peer_median
    is_ours = row["contender"].endswith(OURS)
    face = colour if is_ours else "white"
    axis.plot([low, high], [position, position], color=colour, linewidth=1.4, alpha=0.6, zorder=2)
    style = {"marker": "o", "linestyle": "none", "markerfacecolor": face, "markeredgecolor": colour, "zorder": 3}
    axis.plot(ratio, position, markersize=5.5 if is_ours else 4.5, label=row["contender"], **style)
    if is_ours:
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 6.5}
        axis.annotate(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}", (max(high, ratio), position), **place)


def count(number: str) -> str:
    return f"{int(number):,}" if int(number) < 1e6 else f"{int(number) / 1e6:.2f}M"
