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
    PEER: "Without clipping: time of a step / AdamW fused",
    CLIPPED_PEER: "With clipping: time of a step / AdamW fused + clip_grad_norm_",
}
BAR = 0.21  # inches
CAPTION_WIDTH = 150  # characters, of some 170 that the picture has room for
LEAST_RANGE = 0.75, 1.5  # of the ratios' axis, where all are near 1
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)


def plot(csv_path: Path, picture_path: Path | None = None) -> Path:
    picture_path = picture_path or csv_path.with_suffix(".png")
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    figure_of(read_rows(csv_path)).savefig(picture_path, dpi=160)
    return picture_path


def figure_of(rows: Sequence[Row]) -> Figure:
    panels = {peer: bars for peer in PANELS if (bars := [row for row in rows if is_bar(row, peer)])}
    # A gap of one bar between suites, and one more at the ends.
    heights = [len(bars) + len(suites_of(bars)) + 1 for bars in panels.values()] or [1]
    figure = Figure(figsize=(10, BAR * sum(heights) + 1.1 * len(heights) + 0.9), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for axis, (peer, bars) in zip(axes, panels.items(), strict=False):
        draw_panel(axis, rows, bars, PANELS[peer])
    figure.supxlabel(caption(rows), fontsize=7.5, color="#444444", x=0.01, ha="left")
    return figure


def is_bar(row: Row, peer: str) -> bool:
    """The peer itself is the line at 1."""
    return row["peer"] == peer and row["contender"] != peer


def suites_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["suite"] for row in rows))


def draw_panel(axis: Axes, rows: Sequence[Row], bars: Sequence[Row], title: str) -> None:
    """Bars start at 1 on a logarithmic axis: to the left is faster than the peer, to the right slower."""
    peer_medians = {row["suite"]: float(row["median_s"]) for row in rows if row["contender"] == bars[0]["peer"]}
    centres, names = [], []
    position = 0.0
    for suite in suites_of(bars):
        group = [row for row in bars if row["suite"] == suite]
        for offset, row in enumerate(group):
            draw_bar(axis, row, position + offset, peer_medians[suite])
        centres.append(position + (len(group) - 1) / 2)
        names.append(f"{suite}\n{count(group[0]['elements'])} elements\ntensors: {count(group[0]['tensors'])}")
        position += len(group) + 1
    axis.set_yticks(centres, names, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(position - 0.7, -1.5)
    axis.set_xscale("log")
    axis.plot(LEAST_RANGE, (0, 0), linestyle="none")
    axis.xaxis.set_major_locator(FixedLocator(TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.tick_params(axis="x", labelbottom=True)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.axvline(1, color="black", linewidth=1)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(title, fontsize=10.5, loc="left")
    for text, offset, side in (("faster ", -3, "right"), (" slower", 3, "left")):
        axis.annotate(text, (1, -1.4), (offset, 0), textcoords="offset points", ha=side, va="top", fontsize=8)
    handles, labels = axis.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    axis.legend(by_label.values(), by_label.keys(), fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def count(number: str) -> str:
    return f"{int(number):,}" if int(number) < 1e6 else f"{int(number) / 1e6:.2f}M"


def draw_bar(axis: Axes, row: Row, position: float, peer_median: float) -> None:
    ratio = float(row["ratio"])
    low, high = float(row["q1_s"]) / peer_median, float(row["q3_s"]) / peer_median
    colour = COLOURS[row["contender"]]
    axis.barh(position, ratio - 1, left=1, height=0.86, color=colour, label=row["contender"], zorder=2)
    axis.errorbar(ratio, position, xerr=[[ratio - low], [high - ratio]], color="#222222", linewidth=1.1, capsize=2)
    axis.annotate(
        f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}",
        (max(high, 1), position),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def caption(rows: Sequence[Row]) -> str:
    first = rows[0]
    repeats = ", ".join(f"{suite} {n}" for suite, n in {row["suite"]: row["repeats"] for row in rows}.items())
    loads = [float(row["other_load"]) for row in rows if row["other_load"]]
    busy = f"; others used up to {max(loads):.2f} cores" if loads else ""
    place = f"{first['threads']} of {first['cores']} cores, {first['cpu']} (cpu){busy}"
    if first["device"] != "cpu":
        place = first["device"]
    lines = [
        f"Ratio of medians, whiskers: quartiles. All contenders take turns. {first['dtype']}, {place}.",
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
