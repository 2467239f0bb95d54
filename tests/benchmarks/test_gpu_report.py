"""The report about a GPU: its parts without one, and all of it, quickly, where there is one or the virtual one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_launches, gpu_modes, gpu_report
from benchmarks.contenders import CLIPPED_PEER, PEER, Contender, parameters
from benchmarks.gpu_modes import MODES, Mode
from benchmarks.gpu_report import Result, Section
from tests.device import DEVICE

on_gpu_only = pytest.mark.skipif(
    DEVICE == "cpu" or "SWD_FUSED_TEST_DEVICE" not in os.environ, reason="needs a GPU, or the virtual one"
)
on_cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="has no need of a GPU")
EXACT = "FusedAdamS exact (triton)"


def row(contender: str, ratio: float, peer: str = PEER) -> dict[str, Any]:
    """What benchmarks.step_time measures of one contender."""
    times = {"median_s": 0.002 * ratio, "q1_s": 0.0018 * ratio, "q3_s": 0.0022 * ratio, "ratio": ratio, "peer": peer}
    speed = {"bytes_per_element": 32, "gb_per_s": 1600.0, "peak_gb_per_s": 3200.0, "share_of_peak": 0.5}
    size = {"elements": 100_000_000, "tensors": 3, "dtype": "float32", "repeats": 31}
    place = {"threads": 1, "device": "Some GPU", "cpu": "Some CPU", "cores": 8, "other_load": 0.25, "huge_pages": ""}
    made_with = {"torch": "2.13", "swd_fused": "0.1", "python": "3.11", "date": "2026-01-01T00:00:00"}
    return {"suite": "some", "contender": contender, "backend": "", **size, **times, **speed, **place, **made_with}


STEP_ROWS = [row(PEER, 1.0), row(EXACT, 1.14), row(CLIPPED_PEER, 1.0, CLIPPED_PEER)]
MODE_ROW = {
    "mode": "exact",
    "elements": 1000,
    "repeats": 3,
    "median_s": 0.01,
    "q1_s": 0.009,
    "q3_s": 0.011,
    "bytes_per_element": 20.06,
    "gb_per_s": 123.4,
    "peak_gb_per_s": None,
    "share_of_peak": None,
}


@on_cpu_only
def test_a_report_of_rows(tmp_path: Path) -> None:
    results = {
        "Step times": Result(gpu_report.step_times_text(STEP_ROWS), step_rows=STEP_ROWS),
        "Peak": Result(gpu_report.peak_text([MODE_ROW]), mode_rows=[MODE_ROW]),
    }
    paths = gpu_report.written(tmp_path, "torch 2.13", results, is_virtual=False, is_quick=False)
    assert [path.name for path in paths] == ["gpu_report.md", "step_time.csv", "modes.csv", "step_time.png"]
    report = paths[0].read_text()
    assert "```text\ntorch 2.13\n```" in report
    assert f"| {EXACT} | 2.28 | 2.05 - 2.51 | 1.14 | 1600 | 50% |" in report
    assert "Other processes used 0.2 cores" in report
    assert "| exact | 20.06 | 10.00 | 123 |  |" in report
    assert "Peak: not known for this device" in report
    assert "| Step times | ok | 0 |" in report
    assert "virtual" not in report
    assert paths[3].read_bytes().startswith(b"\x89PNG")


def fails() -> Any:
    raise ZeroDivisionError("no | peak\nand more")


@pytest.fixture
def _as_if_there_were_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "virtual H100")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_report, "environment_text", lambda: "some environment")
    monkeypatch.setattr(gpu_report, "parameters", lambda shapes, device: parameters(shapes))


@on_cpu_only
@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_a_section_that_fails_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Section("Good", lambda: Result("All is well."))
    monkeypatch.setattr(gpu_report, "sections", lambda *_: [Section("Bad", fails), good])
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)  # as after an illegal access
    assert gpu_report.main(["--out", str(tmp_path)]) == 1
    report = (tmp_path / "gpu_report.md").read_text()
    assert "| Bad | **problem**: ZeroDivisionError: no \\| peak |" in report
    assert "Traceback (most recent call last)" in report
    assert 'raise ZeroDivisionError("no' in report
    assert "## Good\n\nAll is well." in report
    assert "nothing ran on hardware, and no time or rate means anything" in report
    assert "Bad: problem: ZeroDivisionError" in capsys.readouterr().out


@on_cpu_only
@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_a_contender_that_fails_is_left_out_with_those_that_are_compared_to_it() -> None:
    def build(params: Any) -> Any:
        return lambda: None

    def broken(params: Any) -> Any:
        raise RuntimeError("built for another CUDA")

    contenders = [
        Contender("good", "", None, "good", build),
        Contender("bad", "", None, "bad", broken),
        Contender("compared to it", "", None, "bad", build),
    ]
    working, errors = gpu_report.usable(contenders)
    assert [contender.name for contender in working] == ["good"]
    assert gpu_report.raising(errors) == "raise: bad"
    (text,) = gpu_report.left_out(errors)
    assert "bad is left out" in text
    assert "built for another CUDA" in text


@on_cpu_only
def test_modes_are_compared_with_plain_pytorch() -> None:
    """Those that need no GPU, with the C++ kernels in the place of Triton's."""
    result = gpu_report.modes_section([mode for mode in MODES if not mode.captured], device="cpu", backend="cpu")
    assert result.problem is None
    assert result.text.count("| agrees |") == len(MODES) - 2


@on_cpu_only
def test_modes_that_differ_or_raise_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Mode("captured", captured=True)  # raises: there is nothing to capture on
    off = Mode("off by too much")
    monkeypatch.setattr(gpu_modes, "TOLERANCES", {torch.float32: 0.0})
    result = gpu_report.modes_section([capture, off], device="cpu", backend="cpu")
    assert result.problem == "differ or raise: captured, off by too much"
    assert "| off by too much | **DIFFERS** | inf |" in result.text
    assert "| captured | **RAISES** " in result.text
    assert "Traceback" in result.text


@on_cpu_only
@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_what_raises_is_left_out_and_the_others_are_measured_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_of(mode: Mode, elements: int) -> Any:
        if mode.name == "amsgrad":
            raise MemoryError("too large")

    counts = iter([RuntimeError("no profiler"), {"kernels": 0, "copies": 0, "waits": 2}])
    monkeypatch.setattr(gpu_modes, "step_of", step_of)
    monkeypatch.setattr(gpu_modes, "measured", lambda steps, *_: [{**MODE_ROW, "mode": mode.name} for mode in steps])
    chosen = [Contender(name, "", None, PEER, lambda params: None) for name in (f"{EXACT} 1", f"{EXACT} 2")]
    monkeypatch.setattr(gpu_report, "GPU_CONTENDERS", chosen)
    monkeypatch.setattr(gpu_launches, "counted", lambda step: raised_or_returned(next(counts)))
    peak, launches = gpu_report.peak_section(1000, 3), gpu_report.launches_section([(3,)])
    assert (peak.problem, launches.problem) == ("raise: amsgrad", f"raise: {EXACT} 1")
    assert "amsgrad is left out:\n\n```text\nTraceback" in peak.text
    assert len(peak.mode_rows) == sum(mode.is_measured for mode in MODES) - 1
    assert f"| {EXACT} 2 | not seen | not seen | 2 |" in launches.text


def raised_or_returned(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@on_cpu_only
def test_the_mode_with_an_infinity_skips_a_step() -> None:
    (mode,) = (mode for mode in MODES if mode.overflows)
    training = gpu_modes.Training(mode, "cpu", "torch")
    for t in range(3):
        training.take(t)
    assert training.optimizer.skipped_steps == 1


@on_cpu_only
@pytest.mark.parametrize(
    ("name", "device_type", "kind"),
    [
        ("exact_step_kernel", "CUDA", "kernels"),
        ("Memcpy HtoD (Pinned -> Device)", "CUDA", "copies"),
        ("cudaStreamSynchronize", "CPU", "waits"),
        ("hipDeviceSynchronize", "CPU", "waits"),
        ("cudaLaunchKernel", "CPU", None),
        ("aten::add_", "CPU", None),
    ],
)
def test_events_of_the_profiler(name: str, device_type: str, kind: str | None) -> None:
    event = SimpleNamespace(name=name, device_type=getattr(torch.autograd.DeviceType, device_type))
    assert gpu_launches.kind_of(event) == kind


@on_cpu_only
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        gpu_report.main([])
    assert exit_info.value.code == 2
    assert "finds no CUDA or ROCm GPU here" in capsys.readouterr().err


@on_gpu_only
def test_the_whole_report_quickly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu_report.main(["--quick", "--out", str(tmp_path)])
    report = (tmp_path / "gpu_report.md").read_text()
    assert code == 0, report
    assert report.count("| agrees |") == len(MODES)
    assert report.count("| ok |") == 3 + len(gpu_report.MEASURED_SUITES)
    for name in ("step_time.csv", "modes.csv", "step_time.png"):
        assert (tmp_path / name).stat().st_size
    is_virtual = torch.cuda.get_device_name().startswith("virtual")
    assert ("nothing ran on hardware" in report) == is_virtual
    (launches,) = (line for line in report.splitlines() if line.startswith(f"| {EXACT} |") and line.count("|") == 5)
    kernels, _, waits = (int(cell) for cell in launches.split("|")[2:5])
    assert kernels >= 1
    assert waits == 0
    assert "Wrote" in capsys.readouterr().out
