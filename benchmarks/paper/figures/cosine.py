"""Figures 12 and 20: cosine annealing with warm restarts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper.figures.rows import Row, chosen, grouped, last_epochs
from benchmarks.paper.figures.style import (
    COLOURS,
    curve,
    lambda_axis,
    lambda_name,
    legend,
    panels,
    save,
    seeds_note,
    task_name,
)

PAPER_DECAY = 5e-4


def draw_cosine(rows: list[Row], picture: Path) -> None:
    tasks = grouped(rows, ["data", "model"])
    figure, grid = panels(len(tasks), 3)
    for (test, train, over_decay), of_task in zip(grid, tasks.values(), strict=True):
        for (optimizer,), of_optimizer in grouped(of_task, ["optimizer"]).items():
            shown = chosen(of_optimizer, weight_decay=PAPER_DECAY)
            curve(test, shown, "epoch", "test_error", optimizer, COLOURS[optimizer], scale=100)
            curve(train, shown, "epoch", "train_loss", optimizer, COLOURS[optimizer])
            last = last_epochs(of_optimizer)
            curve(over_decay, last, "weight_decay", "test_error", optimizer, COLOURS[optimizer], scale=100)
        test.set_title(f"{task_name(of_task[0])}, {lambda_name(PAPER_DECAY)}")
        test.set_ylabel("test error, %")
        test.set_yscale("log")
        train.set_ylabel("training loss")
        train.set_yscale("log")
        over_decay.set_ylabel("test error at the end, %")
        lambda_axis(over_decay, of_task)
        for axes in (test, train):
            axes.set_xlabel("epoch")
        legend(test)
    save(figure, picture, "Cosine annealing with warm restarts", seeds_note(rows, "AdamW is given 1000 λ."))
