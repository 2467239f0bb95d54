"""Figures 4 and 5: what the schedule does, and how it depends on lambda."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper.figures.rows import Row, grouped
from benchmarks.paper.figures.style import COLOURS, curve, lambda_name, legend, panels, save, seeds_note, task_name

MEASURES = {
    "squared_grad_norm": "G",
    "adamw_weight_decay": "decay, in AdamW's terms",
    "train_loss": "training loss",
}


def draw_schedule(rows: list[Row], picture: Path) -> None:
    tasks = grouped(rows, ["data", "model"])
    figure, grid = panels(len(tasks), 4, width=3.1)
    for row_of_axes, of_task in zip(grid, tasks.values(), strict=True):
        runs = grouped(of_task, ["optimizer", "weight_decay"])
        decays = sorted({decay for optimizer, decay in runs if optimizer == "AdamS"})
        colours = {
            (optimizer, decay): COLOURS["AdamW"]
            if optimizer == "AdamW"
            else ("#56B4E9", "#0072B2", "#003366")[decays.index(decay) % 3]
            for optimizer, decay in runs
        }
        for axes, (measure, label) in zip(row_of_axes, MEASURES.items(), strict=False):
            for (optimizer, decay), of_run in runs.items():
                curve(axes, of_run, "epoch", measure, f"{optimizer}, {lambda_name(decay)}", colours[optimizer, decay])
            axes.set_yscale("log")
            axes.set_ylabel(label)
        legend(row_of_axes[0])
        for (optimizer, decay), of_run in runs.items():
            if optimizer == "AdamS":
                relative = [{**row, "strength": row["adamw_weight_decay"] / decay} for row in of_run]
                curve(row_of_axes[3], relative, "epoch", "strength", lambda_name(decay), colours[optimizer, decay])
        row_of_axes[3].set_yscale("log")
        row_of_axes[3].set_ylabel("1 / rms gradient")
        row_of_axes[3].set_title("strength of the schedule")
        legend(row_of_axes[3])
        for axes in row_of_axes:
            axes.set_xlabel("epoch")
        row_of_axes[0].set_title(task_name(of_task[0]))
    save(figure, picture, "The schedule follows the gradient norm", seeds_note(rows, "AdamW is given 1000 λ."))
