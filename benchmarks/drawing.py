"""How all pictures look: colours, frames, legends, and the caption that has the conditions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot a figure draws with Agg, on machines without a display too

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


def tidy(axis: Axes, grid: str = "y") -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, colors=INK)


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
