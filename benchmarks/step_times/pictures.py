"""Draws the pictures of step times from their CSV files. Nothing here measures.

python -m benchmarks.step_times.pictures CSV [PNG]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from benchmarks.conditions import read_rows
from benchmarks.drawing import PALETTE, legend_above, measured_on, save, tidy, unique
from benchmarks.step_times.contenders import CLIPPED_PEER, PEER, TORCHAO

Row = dict[str, str]

# --- Step times: ratios by suite

KERNEL_COLOURS = {
    "exact": PALETTE["blue"],
    "lagged": PALETTE["sky"],
    "exact 8bit": PALETTE["green"],
    "lagged 8bit": "#7FCEB9",
    "exact + clip": PALETTE["blue"],
}
COLOURS = {
    **{f"FusedAdamS {mode} ({kernels})": c for kernels in ("cpu", "triton") for mode, c in KERNEL_COLOURS.items()},
    "FusedAdamS exact (torch)": PALETTE["orange"],
    "FusedAdamS lagged (torch)": PALETTE["yellow"],
    "FusedAdamS exact + clip (torch)": PALETTE["orange"],
    TORCHAO: PALETTE["red"],
    "apex FusedAdam": "#882255",
    "bitsandbytes AdamW8bit": "#332288",
    "flashoptim FlashAdamW": "#117733",
    "AdamW foreach": "#999999",
    "authors' loop": PALETTE["pink"],
}
PANELS = {PEER: "AdamW fused is at 1", CLIPPED_PEER: "clip_grad_norm_ + AdamW fused is at 1"}
OURS = ("(cpu)", "(triton)")  # of kernels, which are drawn full, and the others as rings
ROW = 0.62  # inches
SPREAD = 0.72  # of a row's height, over which its points are spread
LEAST_RANGE = 0.75, 1.5  # of the ratios' axis, where all are near 1
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)


def plot_step_time(path: Path, picture: Path | None = None) -> Path:
    rows = read_rows(path)
    panels = {peer: [r for r in rows if r["peer"] == peer and r["contender"] != peer] for peer in PANELS}
    panels = {peer: points for peer, points in panels.items() if points} or {PEER: []}
    suites = max(len(unique(points, "suite")) for points in panels.values())
    figure = Figure(figsize=(11, ROW * suites + 2.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=[1.6, 1][: len(panels)])[0]
    for axis, (peer, points) in zip(axes, panels.items(), strict=True):
        medians = {row["suite"]: float(row["median_s"]) for row in rows if row["contender"] == peer}
        draw_ratios(axis, points, medians, with_sizes=axis is axes[0])
        axis.set_title(PANELS[peer], fontsize=9.5, loc="left")
    legend_above(figure, axes, columns=4)
    repeats = ", ".join(f"{suite} {n}" for suite, n in {row["suite"]: row["repeats"] for row in rows}.items())
    note = f"Ratio of medians, lines: quartiles. All contenders take turns. {rows[0]['dtype']}. Repeats: {repeats}."
    return save(figure, picture or path.with_suffix(".png"), f"{note} {measured_on(rows)}")


def draw_ratios(axis: Axes, points: Sequence[Row], medians: dict[str, float], with_sizes: bool) -> None:
    """Draws a row of points for each suite, on a logarithmic axis."""
    suites, names = unique(points, "suite"), []
    for position, suite in enumerate(suites):
        group = [row for row in points if row["suite"] == suite]
        for index, row in enumerate(group):
            offset = (index / (len(group) - 1) - 0.5) * SPREAD if len(group) > 1 else 0.0
            draw_ratio(axis, row, position + offset, medians[suite])
        sizes = f"{count(group[0]['elements'])} elements\ntensors: {count(group[0]['tensors'])}"
        names.append(f"{suite}\n{sizes}" if with_sizes else "")
        if position % 2 == 0:
            axis.axhspan(position - 0.5, position + 0.5, color="#f3f3f3", zorder=0)
    tidy(axis, "x")
    axis.set_yticks(range(len(suites)), names, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(max(len(suites), 1) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.plot(LEAST_RANGE, (0, 0), linestyle="none")
    axis.xaxis.set_major_locator(FixedLocator(TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:g}")
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlabel("time of a step: faster to the left, slower to the right", fontsize=8)


def draw_ratio(axis: Axes, row: Row, position: float, peer_median: float) -> None:
    ratio, low, high = float(row["ratio"]), float(row["q1_s"]) / peer_median, float(row["q3_s"]) / peer_median
    colour, is_ours = COLOURS[row["contender"]], row["contender"].endswith(OURS)
    face = colour if is_ours else "white"
    axis.plot([low, high], [position, position], color=colour, linewidth=1.4, alpha=0.6, zorder=2)
    style = {"marker": "o", "linestyle": "none", "markerfacecolor": face, "markeredgecolor": colour, "zorder": 3}
    axis.plot(ratio, position, markersize=5.5 if is_ours else 4.5, label=row["contender"], **style)
    if is_ours:
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 6.5}
        axis.annotate(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}", (max(high, ratio), position), **place)


def count(number: str) -> str:
    return f"{int(number):,}" if int(number) < 1e6 else f"{int(number) / 1e6:.2f}M"


# --- Cliffs: a map of ratios

CLIFF = 2.0  # ratios above it are marked
LEAST_COLOURS = 4.0  # how far the colours reach to both sides of 1 at least, so that noise looks pale
CELL = 0.27  # inches


def plot_cliffs(path: Path, picture: Path | None = None) -> Path:
    rows = [row for row in read_rows(path) if row.get("contender", row["case"]) == row["case"]]
    states = unique(rows, "state")
    # In the order of the state that has most cases: float16 lacks one in the middle.
    fullest = max(states, key=lambda state: sum(row["state"] == state for row in rows))
    names = unique([*(row for row in rows if row["state"] == fullest), *rows], "case")
    figure = Figure(figsize=(10, CELL * len(names) + 2.1), layout="constrained")
    axis = figure.subplots()
    ratios = {(row["case"], row["state"]): float(row["ratio"]) for row in rows}
    grid = [[ratios.get((name, state), float("nan")) for state in states] for name in names]
    most = max(LEAST_COLOURS, *ratios.values(), *(1 / ratio for ratio in ratios.values()))
    # Blue is faster and red slower, for readers with any kind of colour vision.
    axis.imshow(grid, norm=LogNorm(1 / most, most), cmap="RdBu_r", aspect="auto")
    for (name, state), ratio in ratios.items():
        text = axis.text(states.index(state), names.index(name), f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}")
        text.set(ha="center", va="center", fontsize=8, fontweight="bold" if ratio > CLIFF else "normal")
        text.set_color("white" if max(ratio, 1 / ratio) > most**0.6 else "black")
    floors = {row["state"]: float(row["bytes_per_element"]) for row in rows}
    labels = [f"{state.replace(' ', chr(10), 1)}\n{floors[state]:.4g} bytes" for state in states]
    axis.set_xticks(range(len(states)), labels, fontsize=8)
    axis.xaxis.tick_top()
    of_rows = [f"plain / {PEER} float32" if name == "plain" else name for name in names]
    axis.set_yticks(range(len(names)), of_rows, fontsize=8)
    axis.tick_params(length=0)
    factors = {row["case"]: row["factor"] for row in rows}
    for index in range(1, len(names)):
        if factors[names[index]] != factors[names[index - 1]]:
            axis.axhline(index - 0.5, color="black", linewidth=1)
    axis.spines[:].set_visible(False)
    repeats = sorted({int(row["repeats"]) for row in rows})
    note = (
        "Time of a step / the plain step of the same dtype and state, with which it takes turns: ratio of medians, "
        f"bold above {CLIFF:g}. {int(rows[0]['elements']):,} elements, {rows[0]['schedule']} schedule. "
        f"Repeats: {repeats[0]} to {repeats[-1]}. Bytes: what a plain step moves at least, per element."
    )
    return save(figure, picture or path.with_suffix(".png"), f"{note} {measured_on(rows)}")


# --- Busy neighbours: mean times

STYLES = (("#222222", "o"), (PALETTE["blue"], "s"), (PALETTE["orange"], "^"))


def plot_busy_machine(path: Path, picture: Path | None = None) -> Path:
    rows = read_rows(path)
    suites = unique(rows, "suite")
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, len(suites), squeeze=False)[0]
    for axis, suite in zip(axes, suites, strict=True):
        of_suite = [row for row in rows if row["suite"] == suite]
        for contender, (colour, marker) in zip(unique(of_suite, "contender"), STYLES, strict=False):
            own = [row for row in of_suite if row["contender"] == contender]
            points = sorted((int(row["neighbours"]), float(row["mean_ms"])) for row in own)
            style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2, "label": contender}
            axis.plot(*zip(*points, strict=True), **style)
        axis.set_yscale("log")
        # Labels at 1, 2 and 5 of each power of ten, since a panel may span less than one.
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(sorted({int(row["neighbours"]) for row in of_suite}))
        axis.set_xlabel("busy neighbours", fontsize=8)
        axis.set_title(f"{suite}: {int(of_suite[0]['elements']):,} elements", fontsize=8, loc="left")
        tidy(axis, "both")
    axes[0].set_ylabel("mean ms of a step", fontsize=8)
    legend_above(figure, axes[:1], columns=3)
    note = "Mean time of a step beside processes that never sleep, optimizers taking turns step by step; scales differ."
    return save(figure, picture or path.with_suffix(".png"), f"{note} {measured_on(rows)}")


# --- Sharded steps: what is added to AdamW's


def plot_sharded_step(path: Path, picture: Path | None = None) -> Path:
    rows = read_rows(path)
    bars = [row for row in rows if row["contender"] != row["peer"]]
    names = unique(bars, "contender")
    panels = list(dict.fromkeys((row["suite"], row["ranks"]) for row in bars))
    figure = Figure(figsize=(10, 0.9 + 2.0 * len(panels)), layout="constrained")
    for axis, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        here = [row for row in rows if (row["suite"], row["ranks"]) == panel]
        own = {row["contender"]: row for row in here}
        for position, (name, colour) in enumerate(zip(names, [*PALETTE.values(), "#999999"], strict=False)):
            # A bare all-reduce is no step: its own time, not what it adds to one.
            keys = ("median_s", "q1_s", "q3_s") if "all-reduce" in name else ("added_s", "added_q1_s", "added_q3_s")
            middle, low, high = (1e3 * float(own[name][key]) for key in keys)
            axis.barh(position, middle, color=colour, zorder=2)
            whiskers = [[middle - low], [high - middle]]
            axis.errorbar(middle, position, xerr=whiskers, color="#222222", capsize=2, zorder=3)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.axvline(0, color="black", linewidth=1)
        tidy(axis, "x")
        took = 1e3 * float(own[PEER]["median_s"])
        axis.set_title(f"{panel[0]}, {panel[1]} ranks: ms added to {PEER} ({took:.1f})", fontsize=9, loc="left")
    note = (
        f"Medians of differences within a round, whiskers: quartiles; with clipping to {CLIPPED_PEER}. FSDP2, gloo on "
        f"loopback, one thread a rank, {rows[0]['repeats']} repeats, load average {float(rows[0]['load_average']):.1f}."
    )
    return save(figure, picture or path.with_suffix(".png"), f"{note} {measured_on(rows)}")


PICTURES: dict[str, Callable[[Path, Path | None], Path]] = {
    "step_time": plot_step_time,
    "cliffs": plot_cliffs,
    "busy_machine": plot_busy_machine,
    "sharded_step": plot_sharded_step,
}

if __name__ == "__main__":
    given = Path(sys.argv[1])
    print(f"Wrote {PICTURES[given.stem](given, Path(sys.argv[2]) if len(sys.argv) > 2 else None)}")
