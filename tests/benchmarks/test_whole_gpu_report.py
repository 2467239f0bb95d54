"""The report about a GPU, whole and quickly, where there is one or the virtual one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_modes, gpu_report
from tests.device import DEVICE


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU, or the virtual one")
def test_the_whole_report_quickly(tmp_path: Path) -> None:
    # An emulated GPU is slow, and the machine that emulates it may be busy.
    code = gpu_report.main(["--quick", "--limit", "1800", "--out", str(tmp_path)])
    report = (tmp_path / "gpu_report.md").read_text()
    assert code == 0, report
    assert report.count("| agrees, ") == len(gpu_modes.MODES)
    assert report.count("| ok |") == 3 + len(gpu_report.MEASURED_SUITES)
    for name in ("step_time.csv", "modes.csv", "step_time.png"):
        assert (tmp_path / name).stat().st_size
    assert ("nothing ran on hardware" in report) == torch.cuda.get_device_name().startswith("virtual")
    start = "| FusedAdamS exact (triton) |"
    (launches,) = (line for line in report.splitlines() if line.startswith(start) and line.count("|") == 5)
    kernels, _, waits = (int(cell) for cell in launches.split("|")[2:5])
    assert kernels >= 1
    assert waits == 0
