"""Rows of a CSV file: values as numbers, groups, and mean and range over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import conditions

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there, wanted what the command writes without --draw.")
    return [{key: number(value) for key, value in row.items()} for row in conditions.read_rows(path)]


def number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() and "." not in text and "e" not in text else value


def grouped(rows: Iterable[Row], by: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Groups come in the order in which they first appear."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in by)].append(row)
    return dict(groups)


def chosen(rows: Iterable[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row[column] == value for column, value in values.items())]


def over_seeds(rows: Iterable[Row], x: str, y: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns x, and mean, least and most of y over the seeds at each x. Rows without a value of y are left out."""
    at = grouped((row for row in rows if row[y] == row[y]), [x])
    xs = sorted(at)
    values = [[row[y] for row in at[each]] for each in xs]
    mean, least, most = (np.array([f(v) for v in values]) for f in (np.mean, np.min, np.max))
    return np.array([each[0] for each in xs], dtype=float), mean, least, most
