"""How all pictures look: colours, frames, legends, and the caption that has the conditions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure  # without pyplot a figure draws with Agg, on machines without a display too
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

if TYPE_CHECKING:  # it imports scipy, which the pictures of step times do without
    from benchmarks.studies.intervals import Interval

# Okabe and Ito's palette, which readers with any kind of colour vision can tell apart.
PALETTE = {
    "blue": "#0072B2",
    "sky": "#56B4E9",
    "green": "#009E73",
    "red": "#D55E00",
    "orange": "#E69F00",
    "pink": "#CC79A7",
    "yellow": "#F0E442",
}
INK, GREY = "#333333", "#777777"
CHARACTERS = 15.5  # of a caption for each inch


def tidy(axis: Axes, grid: str | None = "y") -> None:
    axis.spines[["top", "right"]].set_visible(False)
    if grid:
        axis.grid(axis=grid, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
        axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, colors=INK)


def plain_log_ticks(axis: Axis) -> None:
    """Writes numbers as people do, more of them in each decade where there are few decades."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        subs = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2 else (1,)
        axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


class Differences(NamedTuple):
    """A line of a forest plot: differences within pairs of runs, and the interval of their mean where there is one."""

    label: str
    values: Sequence[float]
    interval: Interval | None
    colour: str


def forest(axis: Axes, lines: Sequence[Differences], form: str = "") -> None:
    """Draws pairs as dots, and below them the mean as a diamond in its interval, hollow if it has none.

    With `form` intervals stand in numbers at the right.
    """
    axis.axvline(0.0, color="#444444", linewidth=0.8, zorder=1)
    for place, (_, values, interval, colour) in enumerate(lines):
        axis.scatter(values, [place - 0.16] * len(values), s=12, color=colour, alpha=0.5, linewidths=0)
        if interval is None:
            if values:
                axis.scatter(fmean(values), place + 0.12, marker="D", s=36, facecolors="none", edgecolors=colour)
            continue
        ends = [[interval.mean - interval.low], [interval.high - interval.mean]]
        style = {"marker": "D", "markersize": 6, "capsize": 4, "linewidth": 1.8}
        axis.errorbar(interval.mean, place + 0.12, xerr=ends, color=colour, **style)  # type: ignore[arg-type]
        if not form:
            continue
        at = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
        axis.annotate(interval.shown(form), (1.0, place), va="center", fontsize=8, **at)  # type: ignore[arg-type]
    axis.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    tidy(axis, "x")


def legend_above(figure: Figure, axes: Sequence[Axes], columns: int) -> None:
    """Each label once, although several panels have it."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    place = {"loc": "outside upper left", "ncols": columns, "fontsize": 8, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **place)  # type: ignore[arg-type]


def save(figure: Figure, path: Path, caption: str, title: str = "") -> Path:
    wrapped = textwrap.fill(caption, int(CHARACTERS * figure.get_figwidth()))
    figure.supxlabel(wrapped, fontsize=7.5, color="#444444", x=0.01, ha="left")
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def measured_on(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the conditions of a run, for its caption."""
    first = rows[0]
    loads = [float(row["other_load"]) for row in rows if row.get("other_load")]
    busy = f"; others used up to {max(loads):.2f} cores" if loads else ""
    place = f"{first['threads']} of {first['cores']} cores, {first['cpu']} (cpu){busy}"
    if first["device"] not in ("cpu", ""):
        place = first["device"]
    versions = f"torch {first['torch']}, swd_fused {first['swd_fused']}, Python {first['python']}"
    return f"{place}. {versions}, {first['date'][:10]}."


def unique(rows: Sequence[Mapping[str, str]], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))
