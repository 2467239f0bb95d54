"""Figures 2 and 3: gradient norms over training, for weight decays from none to strong."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper.figures.rows import Row, grouped
from benchmarks.paper.figures.style import NAMES, ORDERED, curve, lambda_name, legend, panels, save, seeds_note


def draw_gradnorm(rows: list[Row], picture: Path) -> None:
    groups = grouped(rows, ["model", "optimizer"])
    decays = sorted({row["weight_decay"] for row in rows})
    figure, grid = panels(2, len(groups), width=3.0, height=2.5)
    for column, ((model, optimizer), of_group) in enumerate(groups.items()):
        for axes, measure in zip((grid[0][column], grid[1][column]), ("grad_norm", "squared_grad_norm"), strict=True):
            for (decay,), of_decay in sorted(grouped(of_group, ["weight_decay"]).items()):
                curve(axes, of_decay, "epoch", measure, lambda_name(decay), ORDERED[decays.index(decay) % len(ORDERED)])
            axes.set_yscale("log")
        grid[0][column].set_title(f"{optimizer}, {NAMES.get(model, model)}")
        grid[1][column].set_xlabel("epoch")
    grid[0][0].set_ylabel("gradient norm")
    grid[1][0].set_ylabel("squared gradient norm, G")
    legend(grid[0][0])
    data = NAMES.get(rows[0]["data"], rows[0]["data"])
    note = seeds_note(rows, f"Data: {data}. AdamW is given 1000 λ. Means over each epoch's minibatches.")
    save(figure, picture, "Gradient norms with weaker and stronger weight decay", note)
