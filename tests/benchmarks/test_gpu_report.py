"""The report about a GPU: its parts without one, and all of it, quickly, where there is one or the virtual one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_kernels, gpu_launches, gpu_modes, gpu_report, gpu_sections, watched_process
from benchmarks.gpu_modes import MODES, Mode
from benchmarks.gpu_report import Section
from benchmarks.gpu_sections import Result
from benchmarks.step_times.contenders import CLIPPED_PEER, PEER, Contender, parameters
from benchmarks.watched_process import Outcome
from swd_fused.backends.triton import launch, plan
from tests.benchmarks import sections
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
    times = Result(gpu_sections.step_times_text(STEP_ROWS, {EXACT: 0.005}), step_rows=STEP_ROWS)
    peak = Result(gpu_sections.peak_text([MODE_ROW]), mode_rows=[MODE_ROW])
    outcomes = {"Step times": Outcome(times, None, "a warning", 1.0), "Peak": Outcome(peak, None, "", 2.0)}
    paths = gpu_report.written(tmp_path, outcomes, is_quick=False)
    assert [path.name for path in paths] == ["gpu_report.md", "step_time.csv", "modes.csv", "step_time.png"]
    report = paths[0].read_text()
    assert f"| {EXACT} | 2.28 | 2.05 - 2.51 | 5.00 | 1.14 | 1600 | 50% |" in report
    assert "Other processes used 0.2 cores" in report
    assert "| exact | 20.06 | 10.00 | 123 |  |" in report
    assert "Peak: not known for this device" in report
    assert "| Step times | ok | 1 |" in report
    assert "It printed:\n\n```text\na warning\n```" in report
    assert paths[3].read_bytes().startswith(b"\x89PNG")


@on_cpu_only
@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_sections_that_fail_hang_or_crash_are_reported_and_the_next_ones_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Section("Bad", sections.fails), Section("Hung", sections.hangs, 10.0), Section("Aborted", sections.aborts)
    monkeypatch.setattr(gpu_report, "sections", lambda *_: [*bad, Section("Good", sections.is_well)])
    assert gpu_report.main(["--out", str(tmp_path)]) == 1
    report = (tmp_path / "gpu_report.md").read_text()
    assert "| Bad | **problem**: ended with exit code 1; ZeroDivisionError: no \\| peak |" in report
    assert "| Hung | **problem**: did not end within 10 s; the stacks of its threads are below |" in report
    assert "| Aborted | **problem**: was ended by SIGABRT |" in report
    assert "| Good | agrees |" in report
    assert report.count("The first half.") == 3
    assert "UserWarning: something is odd" in report
    hung, aborted = report.split("## Hung")[1].split("## Aborted")
    assert "Timeout (0:00:10)!" in hung
    assert "in hangs\n" in hung
    assert "Fatal Python error: Aborted" in aborted
    assert "in aborts\n" in aborted
    assert "Bad: problem: ended with exit code 1; ZeroDivisionError" in capsys.readouterr().out


@on_cpu_only
def test_a_process_that_does_not_end_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_process, "GRACE_SECONDS", 1.0)
    outcome = watched_process.watched(sections.hangs_and_ignores_its_limit, limit=10.0)
    assert outcome.value.text == "The first half."
    assert "did not end within 10 s" in str(outcome.problem)
    assert "it had to be killed" in str(outcome.problem)


@on_cpu_only
@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_the_report_is_written_after_each_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when somebody presses Ctrl-C in the second one."""
    outcomes = iter([Outcome(Result("Found."), None, "", 1.0)])

    def watched(*_: Any) -> Outcome:
        for outcome in outcomes:
            return outcome
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report, "watched", watched)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main(["--out", str(tmp_path)])
    report = (tmp_path / "gpu_report.md").read_text()
    assert "| Environment | ok | 1 |\n| Kernels | not run |  |" in report
    assert "Found." in report


@pytest.fixture
def _as_if_there_were_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_sections, "parameters", lambda shapes, device: parameters(shapes))


@on_cpu_only
def test_every_section_can_be_sent_to_another_process() -> None:
    titles = [section.title for section in gpu_report.sections(False) if pickle.loads(pickle.dumps(section.run))]
    assert titles[:2] == ["Environment", "Kernels"]
    assert len(titles) == 4 + len(MODES) + len(gpu_report.MEASURED_SUITES)


@on_cpu_only
@pytest.mark.filterwarnings("ignore")  # nothing runs, so results are whatever was in memory
def test_the_kernels_of_the_report_are_those_that_modes_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, dtypes and variants, as the backend asks for them."""
    launched = set()

    def noted(kernel: Any, device: Any, *built_for: Any) -> Any:
        launched.add((kernel.__name__, *built_for[:2]))
        return launcher_for(kernel, device, *built_for)

    launcher_for = plan.launcher_for
    monkeypatch.setattr(plan, "launcher_for", noted)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: None)
    for mode in MODES:
        if not mode.captured:
            training = gpu_modes.Training(mode, "cpu", "triton")
            for t in range(2):
                training.take(t)
    listed = {(name, *gpu_kernels.built_for(mode)) for name, mode in gpu_kernels.kernels_of_modes()}
    assert {kernel for kernel, *_ in launched} == {kernel for kernel, *_ in listed}
    steps = {entry for entry in launched if entry[0] in ("exact_step_kernel", "lagged_step_kernel")}
    assert steps == {entry for entry in listed if entry[0] in ("exact_step_kernel", "lagged_step_kernel")}


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
    working, errors = gpu_sections.usable(contenders)
    assert [contender.name for contender in working] == ["good"]
    assert gpu_sections.raising(errors) == "raise: bad"
    (text,) = gpu_sections.left_out(errors)
    assert "bad is left out" in text
    assert "built for another CUDA" in text


@on_cpu_only
def test_modes_are_compared_with_plain_pytorch() -> None:
    """Those that need no GPU, with the C++ kernels in the place of Triton's."""
    for mode in MODES:
        if not mode.captured:
            (result,) = gpu_sections.mode_section(mode.name, device="cpu", backend="cpu")
            assert result.problem is None
            assert "agrees" in result.outcome


@on_cpu_only
def test_a_mode_that_differs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_modes, "TOLERANCES", {torch.float32: 0.0})
    (result,) = gpu_sections.mode_section("exact", device="cpu", backend="cpu")
    assert result.problem == "differs: inf of the difference allowed"


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
    monkeypatch.setattr(gpu_sections, "GPU_CONTENDERS", chosen)
    monkeypatch.setattr(gpu_launches, "counted", lambda step: raised_or_returned(next(counts)))
    (peak,), (launches,) = gpu_sections.peak_section(1000, 3), gpu_sections.launches_section([(3,)])
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
    # An emulated GPU is slow, and the machine that emulates it may be busy.
    code = gpu_report.main(["--quick", "--limit", "1800", "--out", str(tmp_path)])
    report = (tmp_path / "gpu_report.md").read_text()
    assert code == 0, report
    assert report.count("| agrees, ") == len(MODES)
    assert report.count("| ok |") == 4 + len(gpu_report.MEASURED_SUITES)
    for name in ("step_time.csv", "modes.csv", "step_time.png"):
        assert (tmp_path / name).stat().st_size
    is_virtual = torch.cuda.get_device_name().startswith("virtual")
    assert ("nothing ran on hardware" in report) == is_virtual
    compiled = len(gpu_kernels.kernels_of_modes())
    assert f"{compiled} of {compiled} kernels" in report
    (launches,) = (line for line in report.splitlines() if line.startswith(f"| {EXACT} |") and line.count("|") == 5)
    kernels, _, waits = (int(cell) for cell in launches.split("|")[2:5])
    assert kernels >= 1
    assert waits == 0
    assert "Wrote" in capsys.readouterr().out
