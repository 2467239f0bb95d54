"""The comparison of what bad batches do: the command, on small images."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bad_batches
from benchmarks.conditions import read_rows

pytest.importorskip("sklearn")


def test_command(tmp_path: Path) -> None:
    bad_batches.main(["--seeds", "1", "--steps", "60", "--out", str(tmp_path / "bad.csv")])
    found = {(row["kind"], row["contender"]): int(row["found"]) for row in read_rows(tmp_path / "bad.csv")}
    assert len(found) == 7
    # The first of the three is among the steps that only measure.
    assert [found["gradients", contender] for contender in ("as it is", "skip", "clip")] == [0, 2, 2]
    assert (tmp_path / "bad.png").stat().st_size > 10_000
