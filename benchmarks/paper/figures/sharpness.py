"""Figures 8 and 9: the largest eigenvalues of the Hessian where training ends."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper.figures.rows import Row, chosen, grouped
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


def draw_sharpness(rows: list[Row], picture: Path) -> None:
    figure, [[by_decay, by_optimizer]] = panels(1, 2, width=4.2)
    adamw = sorted(grouped(chosen(rows, optimizer="AdamW"), ["weight_decay"]).items())
    for index, ((decay,), of_decay) in enumerate(adamw):
        curve(by_decay, of_decay, "rank", "eigenvalue", lambda_name(decay), ORDERED[index % len(ORDERED)])
    by_decay.set_title(f"AdamW, {task_name(rows[0])}")

    paper_decay = chosen(rows, optimizer="Adam")[0]["weight_decay"]
    for name in ("Adam", "AdamW", "AdamS"):
        of_name = chosen(rows, optimizer=name, weight_decay=paper_decay)
        curve(by_optimizer, of_name, "rank", "eigenvalue", f"{name}, {lambda_name(paper_decay)}", COLOURS[name])
    for (decay,), of_decay in grouped(chosen(rows, optimizer="AdamS"), ["weight_decay"]).items():
        if decay != paper_decay:
            label = f"AdamS, {lambda_name(decay)}: about AdamW's decay in total"
            curve(by_optimizer, of_decay, "rank", "eigenvalue", label, "#56B4E9")
    by_optimizer.set_title(f"optimizers, {task_name(rows[0])}")
    for axes in (by_decay, by_optimizer):
        axes.set_yscale("log")
        axes.set_xlabel("rank")
        axes.set_ylabel("eigenvalue of the Hessian")
        legend(axes)
    save(figure, picture, "Sharpness of the minima", seeds_note(rows, "AdamW is given 1000 λ."))
