"""Figures by experiment, drawn from the rows of its CSV. Nothing here measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.drawing import GREY, PALETTE, plain_log_ticks, save, tidy
from benchmarks.studies.rows import Row, chosen, grouped, over_seeds

BLUE = PALETTE["blue"]
COLOURS = {"AdamS": BLUE, "AMSGradS": BLUE, "SGDS": BLUE, "AdamW": PALETTE["red"], "Adam": PALETTE["green"]}
COLOURS |= {"SGD": PALETTE["pink"]}
STYLES = (":", "--", "-", "-.")  # of lambdas, from small to large
LABELS = {
    "test_error": "test error",
    "train_loss": "training loss",
    "squared_grad_norm": "squared gradient norm, G",
    "adamw_weight_decay": "decay, in AdamW's terms",
}
SCALED = "AdamW is given 1000 λ."


def at_end(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["epoch"] == row["epochs"]]


def panels(rows: int, columns: int, width: float = 3.6, height: float = 2.9) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def curve(
    axes: Axes, rows: Iterable[Row], measure: str, label: str, colour: str, style: str = "-", x: str = "epoch"
) -> None:
    """Draws the mean over seeds, and a band from the least to the most of them."""
    xs, mean, least, most = over_seeds(rows, x, measure)
    axes.plot(xs, mean, color=colour, linewidth=1.8, linestyle=style, marker="o", markersize=2.5, label=label)
    axes.fill_between(xs, least, most, color=colour, alpha=0.18, linewidth=0)
    axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=LABELS[measure])


def legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=7.5, handlelength=2.4)


def finish(figure: Figure, picture: Path, title: str, rows: Sequence[Row], note: str = "") -> None:
    for axes in figure.axes:
        tidy(axes, grid=None)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                plain_log_ticks(axis)
            elif axis.get_label_text() == "epoch":
                axis.set_major_locator(MaxNLocator(integer=True))
        axes.title.set_fontsize(9.5)
    count = len({row["seed"] for row in rows})
    save(figure, picture, f"Means of {count} seeds; bands reach from the least to the most of them. {note}", title)


def draw_curves(rows: list[Row], picture: Path, title: str, by: Sequence[str], measures: Sequence[str]) -> None:
    """Figures 2 to 5, 12 and 20: a panel for each measure and each group, and in it a line for each setting."""
    groups = grouped(rows, by)
    upright = len(groups) > len(measures)
    shape = (len(measures), len(groups)) if upright else (len(groups), len(measures))
    figure, grid = panels(*shape)
    for (key, of_group), column in zip(groups.items(), grid.T if upright else grid, strict=True):
        lines = grouped(of_group, ["optimizer", "weight_decay"])
        for axes, measure in zip(column, measures, strict=True):
            for (optimizer, decay), of in lines.items():
                rank = sorted(other for name, other in lines if name == optimizer).index(decay)
                label = f"{optimizer}, λ = {decay:g}"
                curve(axes, of, measure, label, COLOURS[optimizer], STYLES[rank % len(STYLES)])
        column[0].set_title(", ".join(map(str, key)))
        legend(column[0])
    finish(figure, picture, title, rows, SCALED)


def draw_table(rows: list[Row], picture: Path) -> None:
    """Tables 1 and 2 as a picture: each seed's test error a dot, their mean a line, best optimizer on top."""
    tasks = grouped(at_end(rows), ["data", "model"])
    figure, [axes_of_tasks] = panels(1, len(tasks), width=5.2 if len(tasks) == 1 else 3.2, height=3.4)
    for axes, (task, of_task) in zip(axes_of_tasks, tasks.items(), strict=True):
        errors = {name: [100 * r["test_error"] for r in of] for (name,), of in grouped(of_task, ["optimizer"]).items()}
        names = sorted(errors, key=lambda name: fmean(errors[name]), reverse=True)
        dots_and_means(axes, {name: errors[name] for name in names}, [COLOURS.get(name, GREY) for name in names])
        axes.set(title=", ".join(task), xlabel="test error, %")
    finish(figure, picture, f"Test error at the end of training, λ = {rows[0]['weight_decay']:g}", rows)


def dots_and_means(axes: Axes, lines: dict[str, list[float]], colours: Sequence[str]) -> None:
    for y, (values, colour) in enumerate(zip(lines.values(), colours, strict=True)):
        mean = fmean(values)
        axes.plot(values, [y] * len(values), "o", color=colour, markersize=4, alpha=0.6)
        axes.plot([mean] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=2)
        place = ("axes fraction", "data")
        axes.annotate(f"{mean:.2f}", (1.0, y), xycoords=place, fontsize=7.5, va="center", color=colour)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.grid(axis="y", color="#EEEEEE")


def draw_basin(rows: list[Row], picture: Path) -> None:
    """Figures 10, 11 and 16: test errors over weight decay, a line for each learning rate."""
    groups = grouped(at_end(rows), ["optimizer", "model", "data"])
    figure, [axes_of_groups] = panels(1, len(groups))
    for axes, (key, of_group) in zip(axes_of_groups, groups.items(), strict=True):
        for (lr,), colour in zip(grouped(of_group, ["lr"]), PALETTE.values(), strict=False):
            curve(axes, chosen(of_group, lr=lr), "test_error", f"lr {lr:g}", colour, x="weight_decay")
        axes.set(title=", ".join(key), xlabel="λ", xscale="log")
        legend(axes)
    finish(figure, picture, "Test error over learning rate and weight decay", rows, SCALED)


def draw_tuned(rows: list[Row], picture: Path) -> None:
    """Lambda chosen on validation data, what it comes to on test data, and the gradient norms of these runs."""
    figure, [[search, test, norms]] = panels(1, 3, width=4.0, height=3.4)
    for (optimizer,), of_optimizer in grouped(chosen(at_end(rows), role="tuning"), ["optimizer"]).items():
        points = sorted((row["weight_decay"], 100 * row["test_error"]) for row in of_optimizer)
        search.plot(*zip(*points, strict=True), "o-", color=COLOURS[optimizer], markersize=3, label=optimizer)
        best = {row["weight_decay"] for row in chosen(rows, role="tuned", optimizer=optimizer)}
        ringed = [point for point in points if point[0] in best]
        search.plot(*zip(*ringed, strict=True), "o", color=COLOURS[optimizer], markersize=9, fillstyle="none")
    search.set_xscale("log")
    search.set(xlabel="λ", ylabel="validation error, %", title="validation, by which λ is chosen")
    legend(search)

    errors, colours = {}, []
    for (optimizer, role, decay), of in reversed(grouped(chosen(rows, part="test"), LINES).items()):
        name = role if role == "no decay" else f"{optimizer}, {role},\nλ = {decay:g}"
        colours.append({"no decay": GREY, "equal decay": PALETTE["sky"]}.get(role, COLOURS[optimizer]))
        errors[name] = [100 * row["test_error"] for row in at_end(of)]
        curve(norms, of, "squared_grad_norm", name, colours[-1])
    dots_and_means(test, errors, colours)
    test.set_ylim(-0.6, len(errors) - 0.4)
    test.set(xlabel="test error, %", title="test, at the end")
    norms.set_title("gradient norms of these runs")
    title = f"λ tuned on validation data: {rows[0]['model']}, {rows[0]['data']}"
    finish(figure, picture, title, chosen(rows, part="test"), f"Left: one seed, rings where λ was chosen. {SCALED}")


LINES = ("optimizer", "role", "weight_decay")
TASK = ("model", "data")
DRAWINGS: dict[str, Callable[[list[Row], Path], None]] = {
    **dict.fromkeys(("tuned", "tuned-unaugmented"), draw_tuned),
    **dict.fromkeys(("table1", "table2"), draw_table),
    "gradnorm": partial(
        draw_curves,
        title="Gradient norms with weaker and stronger weight decay",
        by=("model", "optimizer"),
        measures=("squared_grad_norm", "test_error"),
    ),
    "schedule": partial(
        draw_curves,
        title="The schedule follows the gradient norm",
        by=TASK,
        measures=("squared_grad_norm", "adamw_weight_decay", "train_loss"),
    ),
    "basin": draw_basin,
    "cosine": partial(
        draw_curves,
        title="Cosine annealing with warm restarts",
        by=(*TASK, "weight_decay"),
        measures=("test_error", "train_loss"),
    ),
}
