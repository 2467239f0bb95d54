"""Figure 13: perplexity of a language model over weight decay."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.paper.figures.rows import Row, grouped, last_epochs
from benchmarks.paper.figures.style import COLOURS, curve, lambda_axis, legend, panels, save, seeds_note, task_name


def draw_lstm(rows: list[Row], picture: Path) -> None:
    figure, [[axes]] = panels(1, 1, width=5.2, height=3.2)
    for (optimizer,), of_optimizer in grouped(last_epochs(rows), ["optimizer"]).items():
        with_perplexity = [{**row, "perplexity": math.exp(row["test_loss"])} for row in of_optimizer]
        curve(axes, with_perplexity, "weight_decay", "perplexity", optimizer, COLOURS[optimizer])
    lambda_axis(axes, rows)
    axes.set_ylabel("test perplexity at the end")
    axes.set_title(task_name(rows[0]))
    legend(axes)
    save(figure, picture, "Language modelling", seeds_note(rows, "AdamW is given 1000 λ."))
