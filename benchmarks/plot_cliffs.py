"""Draws the picture of cliffs from their CSV. Measures nothing."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from benchmarks.conditions import read_rows

Row = dict[str, str]

CLIFF = 2.0  # ratios above it are marked
LEAST_RANGE = 4.0  # of the colours, to both sides of 1, so that noise looks pale
COLOURS = "RdBu_r"  # blue is faster and red slower, for readers with any kind of colour vision
PLAIN = "plain"
CELL = 0.27  # inches


def plot(csv_path: Path, picture_path: Path | None = None) -> Path:
    picture_path = picture_path or csv_path.with_suffix(".png")
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    figure_of(read_rows(csv_path)).savefig(picture_path, dpi=160)
    return picture_path


def figure_of(rows: Sequence[Row]) -> Figure:
    states = list(dict.fromkeys(row["state"] for row in rows))
    # In the order of the state that has most cases: float16 lacks one in the middle.
    fullest = max(states, key=lambda state: sum(row["state"] == state for row in rows))
    names = list(dict.fromkeys(row["case"] for row in (*(r for r in rows if r["state"] == fullest), *rows)))
    figure = Figure(figsize=(10, CELL * len(names) + 2.1), layout="constrained")
    draw(figure.subplots(), rows, names, states)
    figure.supxlabel(caption(rows), fontsize=7.5, color="#444444", x=0.01, ha="left")
    return figure


def draw(axis: Axes, rows: Sequence[Row], names: Sequence[str], states: Sequence[str]) -> None:
    ratios = {(row["case"], row["state"]): float(row["ratio"]) for row in rows}
    grid = [[ratios.get((name, state), float("nan")) for state in states] for name in names]
    most = max(LEAST_RANGE, *ratios.values(), *(1 / ratio for ratio in ratios.values()))
    axis.imshow(grid, norm=LogNorm(1 / most, most), cmap=COLOURS, aspect="auto")
    for (name, state), ratio in ratios.items():
        is_dark = max(ratio, 1 / ratio) > most**0.6
        axis.text(
            states.index(state),
            names.index(name),
            f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if is_dark else "black",
            fontweight="bold" if ratio > CLIFF else "normal",
        )
    floors = {row["state"]: float(row["bytes_per_element"]) for row in rows}
    labels = [f"{state.replace(' ', chr(10), 1)}\n{floors[state]:.4g} bytes" for state in states]
    axis.set_xticks(range(len(states)), labels, fontsize=8)
    axis.xaxis.tick_top()
    axis.set_yticks(
        range(len(names)), [f"{PLAIN} / AdamW fused float32" if n == PLAIN else n for n in names], fontsize=8
    )
    axis.tick_params(length=0)
    factors = {row["case"]: row["factor"] for row in rows}
    for index in range(1, len(names)):
        if factors[names[index]] != factors[names[index - 1]]:
            axis.axhline(index - 0.5, color="black", linewidth=1)
    axis.spines[:].set_visible(False)


def caption(rows: Sequence[Row]) -> str:
    first = rows[0]
    repeats = sorted({int(row["repeats"]) for row in rows})
    loads = [float(row["other_load"]) for row in rows if row["other_load"]]
    busy = f"; others used up to {max(loads):.2f} cores" if loads else ""
    text = (
        "Time of a step / the plain step of the same dtype and state, with which it takes turns: ratio of medians, "
        f"bold above {CLIFF:g}. {int(first['elements']):,} elements, {first['schedule']} schedule, "
        f"{first['threads']} of {first['cores']} cores, {first['cpu']}{busy}. torch {first['torch']}, "
        f"swd_fused {first['swd_fused']}, Python {first['python']}, {first['date'][:10]}. "
        f"Repeats: {repeats[0]} to {repeats[-1]}. Bytes: what a plain step moves at least, per element."
    )
    return textwrap.fill(text, 150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_cliffs", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path("results/cliffs/cliffs.csv"))
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: beside the CSV")
    options = parser.parse_args(arguments)
    print(f"Wrote {plot(options.csv, options.out)}")


if __name__ == "__main__":
    main()
