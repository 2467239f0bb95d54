"""The picture of step times: drawn from any CSV, with a colour for each point, and readable."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import plot_step_time
from benchmarks.conditions import read_rows
from benchmarks.contenders import CONTENDERS, GPU_CONTENDERS, TORCHAO, gpu_peers

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"


def test_plot_from_a_stored_csv(tmp_path: Path) -> None:
    columns = "suite,contender,elements,tensors,dtype,repeats,median_s,q1_s,q3_s,ratio,peer,threads,device,cpu,cores"
    conditions = "2,cpu,Some CPU,2,0.01,2.10,0.1,3.12,2026-01-02T03:04:05"
    lines = [
        columns + ",other_load,torch,swd_fused,python,date",
        f"s,AdamW fused,1000,2,float32,9,1.0,0.9,1.1,1.0,AdamW fused,{conditions}",
        f"s,FusedAdamS exact (cpu),1000,2,float32,9,1.2,1.1,1.3,1.2,AdamW fused,{conditions}",
    ]
    stored = tmp_path / "stored.csv"
    stored.write_text("\n".join(lines))
    plot_step_time.main([str(stored), "--out", str(tmp_path / "new" / "picture.png")])
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(PNG)


def test_every_point_has_a_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other packages too, installed or not."""
    monkeypatch.setattr("benchmarks.contenders.find_spec", lambda package: object())
    names = {c.name for c in (*CONTENDERS, *GPU_CONTENDERS, *gpu_peers()) if c.name != c.peer}
    assert set(plot_step_time.COLOURS) == {*names, TORCHAO}


def test_points_that_are_all_at_1_have_an_axis_around_them() -> None:
    rows = read_rows(ROOT / "benchmarks" / "results" / "step_time.csv")
    figure = plot_step_time.figure_of(
        [{**row, "median_s": "1", "q1_s": "1", "q3_s": "1", "ratio": "1"} for row in rows]
    )
    for axes in figure.axes:
        low, high = axes.get_xlim()
        assert low <= 0.75
        assert high >= 1.5


def test_all_text_is_within_the_picture_and_can_be_read() -> None:
    figure = plot_step_time.figure_of(read_rows(ROOT / "benchmarks" / "results" / "step_time.csv"))
    figure.draw_without_rendering()
    labels = [label for axes in figure.axes for label in axes.get_yticklabels() if label.get_text()]
    sizes = {label.get_text().splitlines()[1] for label in labels}
    assert {"10 elements", "90,112 elements", "1.05M elements", "124.44M elements"} <= sizes
    for text in [*labels, *figure.texts]:
        assert figure.bbox.count_contains(text.get_window_extent().corners()) == 4, text.get_text()
