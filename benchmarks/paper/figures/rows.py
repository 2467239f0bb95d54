"""Rows of a CSV and what the figures make of them: groups, and mean and range over seeds."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

TEXTS = (
    *("data", "model", "optimizer", "milestones", "cosine", "augment", "part", "role"),
    *("device", "cpu", "torch", "python", "date"),
)


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there, wanted the CSV of an experiment. Run it first, without --draw.")
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {key: value if key in TEXTS else number(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() and "." not in text and "e" not in text else value


def grouped(rows: Iterable[Row], by: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """In the order in which groups first appear."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in by)].append(row)
    return dict(groups)


def last_epochs(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["epoch"] == row["epochs"]]


def chosen(rows: Iterable[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row[column] == value for column, value in values.items())]


def over_seeds(rows: Iterable[Row], x: str, y: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, and mean, least and most of y over the seeds at each x. Rows without a value of y are left out."""
    at = grouped((row for row in rows if row[y] == row[y]), [x])
    xs = sorted(at)
    values = [[row[y] for row in at[each]] for each in xs]
    reduced = [np.array([f(v) for v in values]) for f in (np.mean, np.min, np.max)]
    return np.array([each[0] for each in xs], dtype=float), reduced[0], reduced[1], reduced[2]
