"""Tables 1 and 2 as a picture: each seed's test error a dot, their mean a line, best optimizer on top."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from benchmarks.paper.figures.rows import Row, grouped, last_epochs
from benchmarks.paper.figures.style import COLOURS, GREY, panels, save, task_name

SCHEDULED = ("AdamS", "AMSGradS", "SGDS")


def draw_table(rows: list[Row], picture: Path) -> None:
    tasks = grouped(last_epochs(rows), ["data", "model"])
    figure, [axes_of_tasks] = panels(1, len(tasks), width=5.2 if len(tasks) == 1 else 3.2, height=3.4)
    for axes, of_task in zip(axes_of_tasks, tasks.values(), strict=True):
        errors = {
            name: [100 * row["test_error"] for row in of] for (name,), of in grouped(of_task, ["optimizer"]).items()
        }
        names = sorted(errors, key=lambda name: fmean(errors[name]), reverse=True)
        for y, name in enumerate(names):
            colour = COLOURS.get(name, COLOURS["AdamS"] if name in SCHEDULED else GREY)
            axes.plot(errors[name], [y] * len(errors[name]), "o", color=colour, markersize=4, alpha=0.6)
            axes.plot([fmean(errors[name])] * 2, [y - 0.35, y + 0.35], color=colour, linewidth=2)
            axes.annotate(
                f"{fmean(errors[name]):.2f}",
                (1.0, y),
                xycoords=("axes fraction", "data"),
                fontsize=7.5,
                va="center",
                color=colour,
            )
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="y", color="#EEEEEE")
        axes.set_title(task_name(of_task[0]))
        axes.set_xlabel("test error, %")
    decay = rows[0]["weight_decay"]
    seeds = len({row["seed"] for row in rows})
    save(
        figure,
        picture,
        f"Test error at the end of training, λ = {decay:g}",
        f"A dot for each of {seeds} seeds, a line and a number for their mean.",
    )
