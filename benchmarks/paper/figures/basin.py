"""Figures 10, 11 and 16: test errors over learning rate and weight decay."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from benchmarks.paper.figures.rows import Row, grouped
from benchmarks.paper.figures.style import COLOURS, curve, lambda_axis, legend, panels, save, seeds_note, task_name


def draw_basin(rows: list[Row], picture: Path) -> None:
    tasks = list(grouped(rows, ["data", "model"]).values())
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    figure, [axes_row] = panels(1, len(optimizers) + len(tasks), width=3.3)
    errors = {
        key: [100 * row["test_error"] for row in of]
        for key, of in grouped(tasks[0], ["optimizer", "lr", "weight_decay"]).items()
    }
    least = min(fmean(values) for values in errors.values())
    for axes, optimizer in zip(axes_row, optimizers, strict=False):
        lrs = sorted({lr for name, lr, _ in errors if name == optimizer})
        decays = sorted({decay for name, _, decay in errors if name == optimizer})
        grid = np.array([[fmean(errors[optimizer, lr, decay]) for decay in decays] for lr in lrs])
        # All panels have one scale, which ends at twice the least error: worse is worse.
        axes.imshow(grid, origin="lower", cmap="viridis", vmin=least, vmax=2 * least, aspect="auto")
        for y, lr in enumerate(lrs):
            for x, decay in enumerate(decays):
                values = errors[optimizer, lr, decay]
                spread = f"\n±{stdev(values):.1f}" if len(values) > 1 else ""
                colour = "white" if fmean(values) < 1.5 * least else "black"
                axes.text(x, y, f"{fmean(values):.1f}{spread}", ha="center", va="center", fontsize=7.5, color=colour)
        axes.set_xticks(range(len(decays)), [f"{decay:g}" for decay in decays])
        axes.set_yticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
        axes.set_title(optimizer)
        axes.set_xlabel("λ")
        axes.set_ylabel("lr")
    for axes, of_task in zip(axes_row[len(optimizers) :], tasks, strict=True):
        at_default = [row for row in of_task if row["lr"] == 1e-3]
        for (optimizer,), of_optimizer in grouped(at_default, ["optimizer"]).items():
            curve(axes, of_optimizer, "weight_decay", "test_error", optimizer, COLOURS[optimizer], scale=100)
        lambda_axis(axes, of_task)
        axes.set_ylabel("test error, %")
        axes.set_title(f"{task_name(of_task[0])}, lr 0.001")
        legend(axes)
    note = seeds_note(rows, "In the maps mean ± standard deviation, in %. AdamW is given 1000 λ.")
    save(figure, picture, f"Test error over learning rate and weight decay: {task_name(tasks[0][0])}", note)
