"""The report about a GPU: its parts, without one."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_modes, gpu_report, gpu_sections
from benchmarks.gpu_modes import MODES
from benchmarks.gpu_report import Outcome, Section
from benchmarks.step_times.contenders import PEER, Contender, parameters, speeds
from benchmarks.step_times.harness import Case, measure
from tests.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="has no need of a GPU")
EXACT = "FusedAdamS exact (triton)"


def made_up(function: str, title: str = "", limit: float = 60.0) -> Section:
    return Section(title, function, limit=limit, module="tests.benchmarks.sections")


@pytest.fixture
def _as_if_there_were_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_sections, "parameters", lambda shapes, device: parameters(shapes))


def test_a_table_of_step_times() -> None:
    """Where the peak rate is not known."""
    seconds = {PEER: [0.002] * 3, EXACT: [0.004] * 3}
    more = speeds(dict.fromkeys(seconds, 32.0), 100_000_000, None)
    case = Case("", {}, dict.fromkeys(seconds, lambda _: lambda: None), 3, times=lambda *_: seconds, more=more)
    table = gpu_sections.times_table(measure(case))
    assert f"| {PEER} | 2.00 | 2.00 - 2.00 | 1.00 | 1600 |  |" in table
    assert f"| {EXACT} | 4.00 | 4.00 - 4.00 | 2.00 | 800 |  |" in table


@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_sections_that_fail_hang_or_crash_are_reported_and_the_next_ones_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [made_up("fails", "Bad"), made_up("hangs", "Hung", 3.0), made_up("aborts", "Aborted")]
    monkeypatch.setattr(gpu_report, "sections", lambda *_: [*plan, made_up("is_well", "Good")])
    assert gpu_report.main(["--out", str(tmp_path)]) == 1
    report = (tmp_path / "gpu_report.md").read_text()
    assert "| Bad | **problem**: ended with exit code 1; ZeroDivisionError: no \\| peak |" in report
    assert "| Hung | **problem**: did not end within 3 s; the stacks of its threads are below |" in report
    assert "| Aborted | **problem**: was ended by SIGABRT |" in report
    assert "| Good | agrees |" in report
    assert report.count("The first half.") == 3
    assert "UserWarning: something is odd" in report
    hung, aborted = report.split("## Hung")[1].split("## Aborted")
    assert "Timeout (0:00:03)!" in hung
    assert "in hangs\n" in hung
    assert "Fatal Python error: Aborted" in aborted
    assert "in aborts\n" in aborted
    assert "Bad: problem: ended with exit code 1; ZeroDivisionError" in capsys.readouterr().out


def test_a_process_that_does_not_end_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "GRACE_SECONDS", 1.0)
    outcome = gpu_report.outcome_of(made_up("hangs_and_ignores_its_limit"), limit=3.0)
    assert outcome.text == "The first half."
    assert outcome.problem == "did not end within 3 s; the stacks of its threads are below; it had to be killed"


@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_the_report_is_written_after_each_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when somebody presses Ctrl-C in the second one."""
    outcomes = iter([Outcome("Environment", "Found.")])

    def outcome_of(*_: Any) -> Outcome:
        for outcome in outcomes:
            return outcome
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report, "outcome_of", outcome_of)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main(["--out", str(tmp_path)])
    report = (tmp_path / "gpu_report.md").read_text()
    assert "| Environment | Found. | 0 |\n| Mode: exact | not run |  |" in report


def test_every_section_is_a_function_that_takes_its_arguments() -> None:
    sections = gpu_report.sections(False, Path("out"))
    assert len(sections) == 3 + len(MODES) + len(gpu_report.MEASURED_SUITES)
    for section in sections:
        signature(getattr(gpu_sections, section.function)).bind(*section.arguments)
        assert eval(repr(section.arguments)) == section.arguments  # as the other process reads them


@pytest.mark.usefixtures("_as_if_there_were_a_gpu")
def test_a_contender_that_fails_is_left_out_with_those_that_are_compared_to_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(params: Any) -> Any:
        raise RuntimeError("built for another CUDA")

    contenders = [
        Contender("good", "", None, "good", AdamWOfNothing),
        Contender("bad", "", None, "bad", broken),
        Contender("compared to it", "", None, "bad", AdamWOfNothing),
    ]
    working, errors = gpu_sections.usable(contenders)
    assert [contender.name for contender in working] == ["good"]
    with pytest.raises(RuntimeError, match="these raise: bad"):
        gpu_sections.report_errors(errors)
    printed = capsys.readouterr().out
    assert "bad is left out" in printed
    assert "built for another CUDA" in printed


def test_modes_are_compared_with_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that need no GPU, with the C++ kernels in the place of Triton's."""
    modes = [mode for mode in MODES if not mode.captured]
    for mode in modes:
        gpu_sections.mode(mode.name, device="cpu", backend="cpu")
    assert capsys.readouterr().out.count("agrees, ") == len(modes)


def test_a_mode_that_differs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_modes, "TOLERANCES", {torch.float32: 0.0})
    with pytest.raises(AssertionError, match="differs: inf of the difference allowed"):
        gpu_sections.mode("exact", device="cpu", backend="cpu")


class AdamWOfNothing:
    def __init__(self, params: object) -> None:
        self.step = lambda: None
