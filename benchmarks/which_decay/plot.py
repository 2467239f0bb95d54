"""Draws pictures from the CSV files: losses over decay beside exponents, and norms over runs. Measures nothing.

python -m benchmarks.which_decay.plot [DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.conditions import read_rows
from benchmarks.which_decay.contenders import CONTENDERS, DECAYING, NO_DECAY
from benchmarks.which_decay.exponents import Exponent, exponents, stage_of
from benchmarks.which_decay.findings import edge

Row = dict[str, str]

# Colours, of Okabe and Ito's palette, tell the base kind, lines and markers what is added to it.
COLOURS = {c.name: "#777777" if c.name == NO_DECAY else "#D55E00" if c.scheduled else "#0072B2" for c in CONTENDERS}
LINES = {c.name: ":" if c.cautious else "--" if c.corrected else "-" for c in CONTENDERS}
MARKERS = {c.name: "^" if c.cautious else "s" if c.corrected else "o" for c in CONTENDERS}

TASKS = {"gpt": "GPT on prose", "resnet": "ResNet on CIFAR-10"}
NETS = {"digits": "all weights without scale, noisy digits", "plain resnet": "ResNet, CIFAR-10"}
PREDICTED = "#009E73"
NET_STYLES = {"digits": ("o", "#000000"), "plain resnet": ("s", "#CC79A7")}


def plot(folder: Path) -> list[Path]:
    """Returns the pictures that there were CSV files for."""
    losses, curves, stages = (rows(folder / f"which_decay_{name}.csv") for name in ("losses", "curves", "exponents"))
    pictures = []
    if losses or stages:
        pictures.append(main_picture(losses, stages, folder / "which_decay.png"))
    if curves:
        pictures.append(norms_picture(curves, folder / "which_decay_norms.png"))
    return pictures


def rows(path: Path) -> list[Row]:
    return read_rows(path) if path.exists() else []


# --- Losses and exponents


def main_picture(losses: Sequence[Row], stages: Sequence[Row], path: Path) -> Path:
    tasks = list(dict.fromkeys(row["task"] for row in losses))
    found = exponents(map(stage_of, stages))
    panels = len(tasks) + bool(found)
    figure = Figure(figsize=(4.6 * max(panels, 2), 5.0), layout="constrained")
    axes = list(figure.subplots(1, max(panels, 1), squeeze=False)[0])
    for axis, task in zip(axes, tasks, strict=False):
        draw_losses(axis, [row for row in losses if row["task"] == task])
    if tasks:
        axes[0].set_ylabel("validation loss, difference from no decay")
        figure.legend(handles=list(handles()), loc="outside upper left", ncols=4, fontsize=8, frameon=False)
    if found:
        draw_exponents(axes[-1], found)
    figure.supxlabel(caption(losses, stages), fontsize=7.5, color="#444444", x=0.01, ha="left")
    figure.savefig(path, dpi=160)
    return path


def handles() -> Iterator[Line2D]:
    for contender in CONTENDERS:
        name = contender.name
        marker = "" if name == NO_DECAY else MARKERS[name]
        yield Line2D([], [], color=COLOURS[name], linestyle=LINES[name], marker=marker, label=name, markersize=5)


def draw_losses(axis: Axes, own: Sequence[Row]) -> None:
    """Draws differences from the run without decay of the same seed, since seeds differ more than kinds do.

    Lines are seed 0 over the grid. Markers are means where there are more seeds, large ones at the best decay, and bars
    reach from lowest to highest.
    """
    without = {row["seed"]: float(row["validation_loss"]) for row in own if is_of(row, NO_DECAY)}
    axis.axhline(0.0, color=COLOURS[NO_DECAY], linewidth=1.2)
    for place, contender in enumerate(DECAYING):
        name = contender.name
        differences: dict[float, dict[str, float]] = {}
        for row in own:
            if is_of(row, name) and row["seed"] in without:
                of_decay = differences.setdefault(float(row["decay"]), {})
                of_decay[row["seed"]] = float(row["validation_loss"]) - without[row["seed"]]
        grid = sorted((decay, of_decay["0"]) for decay, of_decay in differences.items() if "0" in of_decay)
        if not grid:
            continue
        shift = 1.04 ** (place - (len(DECAYING) - 1) / 2)  # so that bars do not cover each other
        axis.plot(
            [shift * decay for decay, _ in grid],
            [difference for _, difference in grid],
            color=COLOURS[name],
            linestyle=LINES[name],
            linewidth=1.1,
            alpha=0.75,
        )
        best = min(grid, key=lambda point: point[1])[0]
        for decay, of_decay in differences.items():
            if len(of_decay) == 1 and decay != best:
                continue
            seeds = of_decay.values()
            mean = fmean(seeds)
            axis.errorbar(
                shift * decay,
                mean,
                [[mean - min(seeds)], [max(seeds) - mean]],
                color=COLOURS[name],
                marker=MARKERS[name],
                markersize=7 if decay == best else 4,
                capsize=3,
                markerfacecolor=COLOURS[name] if not edge(best, [d for d, _ in grid]) or decay != best else "white",
                zorder=4,
            )
    first = own[0]
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(sorted({float(r["decay"]) for r in own if not is_of(r, NO_DECAY)}))
    axis.set_xlabel("weight decay, in AdamW's terms")
    level = f", {fmean(without.values()):.3f} without decay" if without else ""
    axis.set_title(
        f"{TASKS[first['task']]}, {int(first['parameters']):,} parameters\n{int(first['steps']):,} steps{level}",
        fontsize=10,
        loc="left",
    )
    tidy(axis)


def is_of(row: Row, contender: str) -> bool:
    return row["contender"] == contender


def draw_exponents(axis: Axes, found: Sequence[Exponent]) -> None:
    names = [contender.name for contender in DECAYING]
    for task, (marker, colour) in NET_STYLES.items():
        own = [e for e in found if e.task == task and e.quantity == "normed_grad_norm"]
        if not own:
            continue
        shift = -0.13 if task == "digits" else 0.17
        axis.errorbar(
            [e.interval.mean for e in own],
            [names.index(e.contender) + shift for e in own],
            xerr=[e.interval.half_width if e.seeds > 1 else 0.0 for e in own],
            linestyle="",
            marker=marker,
            color=colour,
            capsize=3,
            markersize=5,
            label=f"measured: {NETS[task]}",
        )
    predictions = [contender.exponent for contender in DECAYING]
    axis.scatter(predictions, range(len(names)), marker="|", s=700, color=PREDICTED, linewidth=3, zorder=1)
    tick = Line2D(
        [], [], marker="|", color=PREDICTED, markersize=10, markeredgewidth=3, linestyle="", label="predicted"
    )
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("exponent of the learning rate in the gradient norm")
    axis.set_title("Gradients as the learning rate falls:\n0: they stay; negative: they grow", fontsize=10, loc="left")
    axis.legend(handles=[tick, *axis.get_legend_handles_labels()[0]], loc="lower left", fontsize=7.5)
    axis.set_ylim(len(names) + 0.9, -0.6)
    axis.margins(x=0.08)
    tidy(axis, "x")


def tidy(axis: Axes, grid: str = "y") -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def caption(losses: Sequence[Row], stages: Sequence[Row]) -> str:
    first = (losses or stages)[0]
    seeds = len({row["seed"] for row in losses})
    said = []
    if losses:
        said.append(
            f"Losses: lines are one seed, markers means of up to {seeds} seeds, bars from the lowest to the highest. "
            "Large: each kind's best decay, hollow if at the edge of the grid. Differences are within seeds."
        )
    if stages:
        said.append("Exponents: means and 95% intervals over seeds, layers that a norm follows, settled stages only.")
    versions = f"torch {first['torch']}, swd_fused {first['swd_fused']}, {first['date'][:10]}"
    return "\n".join([*said, f"CPU, one thread, {first['cpu']}. {versions}."])


# --- Norms over runs


def norms_picture(curves: Sequence[Row], path: Path) -> Path:
    """Seed 0 at the largest decay that all contenders have, where kinds differ most."""
    tasks = list(dict.fromkeys(row["task"] for row in curves))
    figure = Figure(figsize=(5.0 * len(tasks) + 0.6, 6.4), layout="constrained")
    panels = figure.subplots(2, len(tasks), squeeze=False, sharex="col")
    for column, task in enumerate(tasks):
        own = [row for row in curves if row["task"] == task and row["seed"] == "0"]
        grids = [{float(r["decay"]) for r in own if is_of(r, c.name)} for c in DECAYING]
        shared = set.intersection(*(grid for grid in grids if grid))
        if not shared:
            continue
        decay = max(shared)
        for contender in CONTENDERS:
            name = contender.name
            line = [r for r in own if is_of(r, name) and float(r["decay"]) in (decay, 0.0)]
            for axis, value in zip(panels[:, column], ("normed_grad_norm", "normed_weight_norm"), strict=True):
                axis.plot(
                    [int(r["step"]) for r in line],
                    [float(r[value]) for r in line],
                    color=COLOURS[name],
                    linestyle=LINES[name],
                    linewidth=1.4,
                    label=name,
                )
        for axis in panels[:, column]:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
            axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
            tidy(axis)
        panels[0, column].set_title(f"{TASKS[task]}, decay {decay:g}, seed 0", fontsize=10, loc="left")
        panels[1, column].set_xlabel("step; warm-up, then a cosine to zero")
    panels[0, 0].set_ylabel("gradient norm")
    panels[1, 0].set_ylabel("weight norm")
    lines, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper left", ncols=4, fontsize=8, frameon=False)
    note = "The layers that corrected kinds correct. Norms are in the CSV for all runs."
    figure.supxlabel(note, fontsize=7.5, x=0.01, ha="left")
    figure.savefig(path, dpi=160)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.which_decay.plot", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("results/which_decay"), help="default: %(default)s"
    )
    pictures = plot(parser.parse_args(arguments).folder)
    print(f"Wrote {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
