"""Lambda chosen on validation data, and what it comes to on test data: error or perplexity, and the gradient norm."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from benchmarks.paper.figures.rows import Row, chosen, grouped, last_epochs
from benchmarks.paper.figures.style import COLOURS, GREY, curve, legend, panels, save, seeds_note, task_name

LIGHT_BLUE = "#56B4E9"


def draw_tuned(rows: list[Row], picture: Path) -> None:
    figure, [[search, test, norms]] = panels(1, 3, width=4.0, height=3.4)
    draw_search(search, rows)
    draw_test(test, rows)
    for (optimizer, role), of_setting in settings(rows).items():
        curve(norms, of_setting, "epoch", "squared_grad_norm", setting_name(of_setting), colour_of(optimizer, role))
    norms.set_yscale("log")
    norms.set_xlabel("epoch")
    norms.set_ylabel("squared gradient norm, G")
    norms.set_title("gradient norms of these runs")
    note = seeds_note(chosen(rows, part="test"), "Left: one seed, rings where λ was chosen. AdamW is given 1000 λ.")
    save(figure, picture, f"λ tuned on validation data: {task_name(rows[0])}", note)


def draw_search(axes: Axes, rows: list[Row]) -> None:
    tuning = chosen(last_epochs(rows), role="tuning")
    for (optimizer,), of_optimizer in grouped(tuning, ["optimizer"]).items():
        points = sorted((row["weight_decay"], measure(row)) for row in of_optimizer)
        axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[optimizer], markersize=3, label=optimizer)
        best = {row["weight_decay"] for row in chosen(rows, role="tuned", optimizer=optimizer)}
        ringed = [point for point in points if point[0] in best]
        axes.plot(*zip(*ringed, strict=True), "o", color=COLOURS[optimizer], markersize=9, fillstyle="none")
    axes.set_xscale("log")
    exponents = [math.log10(row["weight_decay"]) for row in tuning]
    decades = range(math.ceil(min(exponents)), math.floor(max(exponents)) + 1)
    axes.xaxis.set_major_locator(FixedLocator([10.0**exponent for exponent in decades]))
    axes.set_xlabel("λ")
    axes.set_ylabel(measure_name(tuning[0], "validation"))
    axes.set_title("validation, by which λ is chosen")
    legend(axes)


def draw_test(axes: Axes, rows: list[Row]) -> None:
    """Each seed a dot, their mean a line."""
    of_settings = list(settings(last_epochs(rows)).items())
    for y, ((optimizer, role), of_setting) in enumerate(reversed(of_settings)):
        values, colour = [measure(row) for row in of_setting], colour_of(optimizer, role)
        axes.plot(values, [y] * len(values), "o", color=colour, markersize=4, alpha=0.6)
        axes.plot([fmean(values)] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=2)
        axes.annotate(f"{fmean(values):.1f}", (fmean(values), y + 0.34), fontsize=7.5, ha="center", color=colour)
    axes.set_yticks(range(len(of_settings)), [setting_with_lambda(of) for _, of in reversed(of_settings)])
    axes.set_ylim(-0.6, len(of_settings) - 0.2)
    axes.grid(axis="y", color="#EEEEEE")
    axes.set_xlabel(measure_name(of_settings[0][1][0], "test"))
    axes.set_title("test, at the end")


def settings(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """What was tested, by optimizer and role."""
    tested = [row for row in rows if row["part"] == "test"]
    return {(key[0], key[1]): of for key, of in grouped(tested, ["optimizer", "role"]).items()}


def setting_name(rows: list[Row]) -> str:
    optimizer, role = rows[0]["optimizer"], rows[0]["role"]
    return {"no decay": "no decay", "equal decay": f"{optimizer}, AdamW's\ntotal decay"}.get(
        role, f"{optimizer}, tuned"
    )


def setting_with_lambda(rows: list[Row]) -> str:
    return "no decay" if rows[0]["role"] == "no decay" else f"{setting_name(rows)},\nλ = {rows[0]['weight_decay']:g}"


def colour_of(optimizer: str, role: str) -> str:
    return {"no decay": GREY, "equal decay": LIGHT_BLUE}.get(role, COLOURS[optimizer])


def measure(row: Row) -> float:
    error: float = row["test_error"]
    return math.exp(row["test_loss"]) if math.isnan(error) else 100 * error


def measure_name(row: Row, part: str) -> str:
    return f"{part} perplexity" if math.isnan(row["test_error"]) else f"{part} error, %"
