"""The demo runs to its end and writes what it says. How fast or how well is not judged here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from benchmarks import demo
from benchmarks.studies.rows import chosen, read_rows
from benchmarks.studies.samples import TRAIN_SIZE

STEPS = TRAIN_SIZE // demo.BATCH_SIZE


def test_the_demo_trains_both_alike_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(["--epochs", "1", "--out", str(tmp_path / "new folder")])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("AdamW", "FusedAdamS", "gradient norm", "accuracy", "ratio"))
    assert str(tmp_path / "new folder" / "demo.png") in printed.replace("\n", "")
    assert (tmp_path / "new folder" / "demo.png").read_bytes().startswith(b"\x89PNG")
    rows = read_rows(tmp_path / "new folder" / "steps.csv")
    adamw, adams = (chosen(rows, optimizer=name) for name in (demo.ADAMW, demo.ADAMS))
    assert all(math.isfinite(row["rms_grad"]) for row in adams)
    for own in (adamw, adams):
        assert [row["step"] for row in own] == list(range(1, STEPS + 1))
        assert list(dict.fromkeys(row["lr"] for row in own)) == pytest.approx([1e-3, 1e-4, 1e-5])
    for measure in ("train_loss", "grad_norm"):
        assert adamw[0][measure] == pytest.approx(adams[0][measure], rel=1e-5)
        assert adamw[-1][measure] != adams[-1][measure]
    assert {row["weight_decay"] for row in adamw} == {demo.ADAMW_WEIGHT_DECAY}
    assert len({row["weight_decay"] for row in adams}) == STEPS
