"""Figures by experiment, drawn from the rows of its CSV. Nothing here measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.paper.figures.basin import draw_basin
from benchmarks.paper.figures.cosine import draw_cosine
from benchmarks.paper.figures.coupling import draw_coupling
from benchmarks.paper.figures.gradnorm import draw_gradnorm
from benchmarks.paper.figures.lstm import draw_lstm
from benchmarks.paper.figures.rows import Row
from benchmarks.paper.figures.schedule import draw_schedule
from benchmarks.paper.figures.sharpness import draw_sharpness
from benchmarks.paper.figures.tables import draw_table
from benchmarks.paper.figures.tuned import draw_tuned

DRAWINGS: dict[str, Callable[[list[Row], Path], None]] = {
    "tuned": draw_tuned,
    "tuned-unaugmented": draw_tuned,
    "tuned-lstm": draw_tuned,
    "table1": draw_table,
    "table2": draw_table,
    "gradnorm": draw_gradnorm,
    "schedule": draw_schedule,
    "basin": draw_basin,
    "sharpness": draw_sharpness,
    "cosine": draw_cosine,
    "lstm": draw_lstm,
    "coupling": draw_coupling,
}
