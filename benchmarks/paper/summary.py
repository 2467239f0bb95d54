"""An experiment's outcome as a table: mean and spread over seeds, at the end of training."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from benchmarks.paper.figures.rows import Row, grouped, last_epochs

BY = ("role", "data", "model", "optimizer", "lr", "weight_decay", "epochs")
MEASURES = {
    "test_error": "test error, %",
    "test_loss": "test loss",
    "train_loss": "train loss",
    "squared_grad_norm": "G",
    "eigenvalue": "eigenvalue 1",
}


def summary(rows: list[Row], title: str) -> Table:
    last = [row for row in last_epochs(rows) if row.get("rank", 1) == 1]
    by = [column for column in BY if column in last[0] and len({row[column] for row in last}) > 1] or ["optimizer"]
    if len({(row["optimizer"], row["lr"]) for row in last}) == len({row["optimizer"] for row in last}):
        by = [column for column in by if column != "lr"]
    measures = [
        measure for measure in MEASURES if measure in last[0] and any(row[measure] == row[measure] for row in last)
    ]
    if "test_error" in measures:
        measures.remove("test_loss")
    seeds = len({row["seed"] for row in last})
    table = Table(title=title, caption=f"at the end of training; mean ± standard deviation of {seeds} seeds")
    for column in by:
        table.add_column({"weight_decay": "λ"}.get(column, column))
    for measure in measures:
        table.add_column(MEASURES[measure], justify="right")
    for key, of_key in grouped(last, by).items():
        values = [spread([row[measure] for row in of_key], measure) for measure in measures]
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in key), *values)
    return table


def spread(values: list[float], measure: str) -> str:
    scale, form, spread_form = (100, ".2f", ".2f") if measure == "test_error" else (1, ".3g", ".1g")
    mean = f"{scale * np.mean(values):{form}}"  # NaN where a run diverged, at which statistics.stdev would fail
    return f"{mean} ± {scale * np.std(values, ddof=1):{spread_form}}" if len(values) > 1 else mean
