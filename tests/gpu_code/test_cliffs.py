"""What the command that counts cliffs finds, where it is known."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from .cliffs import Cell, cells, distinct, rows_of
from .ptx_memory import SECTOR

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cliffs_triton.csv"

# Bytes of copies for each float32 element and their number: gradients are copied once, parameters in and out.
COPIES = {
    "transposed": (0.0, 0),
    "channels_last": (0.0, 0),
    "gradient: transposed": (8.0, 1),
    "gradient: expanded": (4.0 + 4.0 / 64, 1),
    "parameter: gaps between rows": (16.0, 2),
}


def test_copies_are_counted() -> None:
    plain, *rows = rows_of([Cell("plain", "64 x 1024", "float32"), *(Cell("layout", c, "float32") for c in COPIES)])
    assert plain["launches"] == plain["bytes_per_element_ratio"] == 1
    for row, (copied, copies) in zip(rows, COPIES.values(), strict=True):
        assert row["copied_bytes_per_element"] == pytest.approx(copied, abs=1e-3)
        assert (row["copies"], row["launches"]) == (copies, 1 + copies)
        assert row["bytes_per_element"] == pytest.approx(plain["bytes_per_element"] + copied, abs=2e-3)
        assert row["bytes_per_element_ratio"] == pytest.approx(row["bytes_per_element"] / 32, rel=1e-2)


def test_units_are_counted_once() -> None:
    tensor = torch.zeros(8, 16)
    assert distinct(tensor, SECTOR) == 8 * 16 * 4 // SECTOR
    assert distinct(tensor[:, ::2], SECTOR) == 8 * 16 * 4 // SECTOR
    assert distinct(tensor[:, ::2], 4) == 8 * 8
    assert distinct(tensor[:1].expand(8, 16), 4) == 16


def test_the_stored_results_have_all_cells() -> None:
    with RESULTS.open(newline="") as file:
        stored = [Cell(*(row[key] for key in Cell._fields)) for row in csv.DictReader(file)]
    assert stored == cells()


def test_no_value_of_gradients_is_a_cliff() -> None:
    """Zeros are read once more: an eighth more bytes in float32, a quarter with moments in 8 bits."""
    with RESULTS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["factor"] == "values"]
    kinds = ("bytes_per_element", "sector_bytes_per_element", "instructions_per_element")
    assert max(float(row[f"{kind}_ratio"]) for row in rows for kind in kinds) <= 1.26
