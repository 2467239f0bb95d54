"""Figure 1 and table 3: decay that follows the learning rate or not, and the best lambda for a number of epochs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper.figures.rows import Row, chosen, grouped, last_epochs
from benchmarks.paper.figures.style import (
    COLOURS,
    ORDERED,
    curve,
    lambda_name,
    legend,
    panels,
    save,
    seeds_note,
    task_name,
)

EQUATIONS = {"SGD, eq 1": "eq 1, not coupled", "SGD, eq 3": "eq 3, coupled with lr"}


def draw_coupling(rows: list[Row], picture: Path) -> None:
    forms = [row for row in rows if row["optimizer"] in EQUATIONS]
    decays = sorted({row["weight_decay"] for row in forms})
    figure, [axes_row] = panels(1, len(decays) + 1)
    for axes, decay in zip(axes_row, decays, strict=False):
        for optimizer, colour in zip(EQUATIONS, (COLOURS["AdamW"], COLOURS["AdamS"]), strict=True):
            shown = chosen(forms, optimizer=optimizer, weight_decay=decay)
            curve(axes, shown, "epoch", "test_error", EQUATIONS[optimizer], colour, scale=100)
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.set_ylabel("test error, %")
        axes.set_title(f"SGD without momentum, {lambda_name(decay)}")
        legend(axes)
    best = axes_row[-1]
    for index, ((epochs,), of_epochs) in enumerate(
        grouped(last_epochs(chosen(rows, optimizer="SGD")), ["epochs"]).items()
    ):
        times_epochs = [{**row, "product": round(row["weight_decay"] * epochs, 6)} for row in of_epochs]
        curve(best, times_epochs, "product", "test_error", f"{epochs} epochs", ORDERED[index % len(ORDERED)], scale=100)
    best.set_xscale("log")
    best.set_yscale("log")
    best.set_xlabel("λ times epochs")
    best.set_ylabel("test error at the end, %")
    best.set_title("SGD with momentum")
    legend(best)
    save(figure, picture, f"Weight decay of SGD: {task_name(rows[0])}", seeds_note(rows))
