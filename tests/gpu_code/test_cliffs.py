"""What the command that counts cliffs finds, where it is known."""

from __future__ import annotations

import pytest
import torch

from .cliffs import Cell, distinct, rows_of
from .ptx_memory import SECTOR

# Bytes of copies for each float32 element and their number: gradients are copied once, parameters in and out.
COPIES = {
    "transposed": (0.0, 0),
    "channels_last": (0.0, 0),
    "gradient: transposed": (8.0, 1),
    "gradient: expanded": (4.0 + 4.0 / 64, 1),
    "parameter: gaps between rows": (16.0, 2),
}


@pytest.mark.slow
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
