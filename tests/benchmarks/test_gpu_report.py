"""The report about a GPU: its parts, without one."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_modes, gpu_report, gpu_sections, watched_process
from benchmarks.gpu_modes import MODES
from benchmarks.gpu_report import Section
from benchmarks.gpu_sections import Result
from benchmarks.step_times.contenders import PEER, Contender, parameters, speeds
from benchmarks.step_times.harness import Case, measure
from benchmarks.watched_process import Outcome
from swd_fused.backends.triton import launch, plan
from tests.benchmarks import sections
from tests.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="has no need of a GPU")
EXACT = "FusedAdamS exact (triton)"


def rows_of(contenders: Sequence[str], elements: int = 100_000_000) -> list[dict[str, Any]]:
    """What benchmarks.step_time measures of contenders that take 2, 4, 6 ms, where the peak rate is not known."""
    seconds = {name: [0.002 * (place + 1)] * 3 for place, name in enumerate(contenders)}
    builds = dict.fromkeys(contenders, lambda _: lambda: None)
    more = speeds(dict.fromkeys(contenders, 32.0), elements, None)
    columns = {"suite": "some", "elements": elements, "tensors": 3, "dtype": "float32", "backend": ""}
    return measure(Case("", columns, builds, 3, times=lambda *_: seconds, more=more))


def test_a_report_of_rows(tmp_path: Path) -> None:
    rows, on_the_wall = rows_of([PEER, EXACT]), rows_of([EXACT])
    times = Result(gpu_sections.step_times_text(rows, on_the_wall), rows={"step_time.csv": rows})
    outcomes = {"Step times": Outcome(times, None, "a warning", 1.0)}
    paths = gpu_report.written(tmp_path, outcomes, is_quick=False)
    assert [path.name for path in paths] == ["gpu_report.md", "step_time.csv"]
    report = paths[0].read_text()
    assert f"| {EXACT} | 4.00 | 4.00 - 4.00 | 2.00 | 2.00 | 800 |  |" in report
    assert f"| {PEER} | 2.00 | 2.00 - 2.00 |  | 1.00 | 1600 |  |" in report
    assert "| Step times | ok | 1 |" in report
    assert "It printed:\n\n```text\na warning\n```" in report


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


def test_a_process_that_does_not_end_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_process, "GRACE_SECONDS", 1.0)
    outcome = watched_process.watched(sections.hangs_and_ignores_its_limit, limit=10.0)
    assert outcome.value.text == "The first half."
    assert "did not end within 10 s" in str(outcome.problem)
    assert "it had to be killed" in str(outcome.problem)


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


def test_every_section_can_be_sent_to_another_process() -> None:
    titles = [section.title for section in gpu_report.sections(False) if pickle.loads(pickle.dumps(section.run))]
    assert titles[:2] == ["Environment", "Kernels"]
    assert len(titles) == 4 + len(MODES) + len(gpu_report.MEASURED_SUITES)


@pytest.mark.filterwarnings("ignore")  # nothing runs, so results are whatever was in memory
def test_the_kernels_of_the_report_are_those_that_modes_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, dtypes and variants, as the backend asks for them."""
    launched = set()

    def noted(kernel: Any, device: Any, *built_for: Any) -> Any:
        launched.add((kernel.__name__, built_for[0]))
        return launcher_for(kernel, device, *built_for)

    launcher_for = plan.launcher_for
    monkeypatch.setattr(plan, "launcher_for", noted)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: None)
    for mode in MODES:
        if not mode.captured:
            training = gpu_modes.Training(mode, "cpu", "triton")
            for t in range(2):
                training.take(t)
    listed = {(name, gpu_modes.built_for(mode)) for name, mode in gpu_modes.kernels_of_modes()}
    assert {kernel for kernel, *_ in launched} == {kernel for kernel, *_ in listed}
    steps = {entry for entry in launched if entry[0] in ("exact_step_kernel", "lagged_step_kernel")}
    assert steps == {entry for entry in listed if entry[0] in ("exact_step_kernel", "lagged_step_kernel")}


@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_a_contender_that_fails_is_left_out_with_those_that_are_compared_to_it() -> None:
    def broken(params: Any) -> Any:
        raise RuntimeError("built for another CUDA")

    contenders = [
        Contender("good", "", None, "good", AdamWOfNothing),
        Contender("bad", "", None, "bad", broken),
        Contender("compared to it", "", None, "bad", AdamWOfNothing),
    ]
    working, errors = gpu_sections.usable(contenders)
    assert [contender.name for contender in working] == ["good"]
    assert gpu_sections.raising(errors) == "raise: bad"
    (text,) = gpu_sections.left_out(errors)
    assert "bad is left out" in text
    assert "built for another CUDA" in text


def test_modes_are_compared_with_plain_pytorch() -> None:
    """Those that need no GPU, with the C++ kernels in the place of Triton's."""
    for mode in MODES:
        if not mode.captured:
            (result,) = gpu_sections.mode_section(mode.name, device="cpu", backend="cpu")
            assert result.problem is None
            assert "agrees" in result.outcome


def test_a_mode_that_differs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_modes, "TOLERANCES", {torch.float32: 0.0})
    (result,) = gpu_sections.mode_section("exact", device="cpu", backend="cpu")
    assert result.problem == "differs: inf of the difference allowed"


class AdamWOfNothing:
    def __init__(self, params: object) -> None:
        self.step = lambda: None


def event(name: str, device: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=getattr(torch.autograd.DeviceType, device))
