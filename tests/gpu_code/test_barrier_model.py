"""How programs wait for one another: the memory order under ThreadSanitizer, the counter in every order of theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .barrier_counter import Protocol, failure

MODEL = Path(__file__).parent / "barrier_model.cpp"
WHOLE = {
    "ARRIVE_ORDER": "memory_order_release",
    "WAIT_ORDER": "memory_order_acquire",
    "LAST_ORDER": "memory_order_acq_rel",
    "BARRIER_BEFORE": "1",
    "BARRIER_AFTER": "1",
}
LEFT_OUT = {
    "the release": {"ARRIVE_ORDER": "memory_order_relaxed"},
    "the acquire": {"WAIT_ORDER": "memory_order_relaxed"},
    "the last one's acquire": {"LAST_ORDER": "memory_order_release"},
    "the release to the last one": {"LAST_ORDER": "memory_order_acquire"},
    "the barrier before the arrival": {"BARRIER_BEFORE": "0"},
    "the barrier after the wait": {"BARRIER_AFTER": "0"},
}


def run_model(tmp_path: Path, protocol: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "barrier_model"
    defines = [f"-D{name}={value}" for name, value in protocol.items()]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, *defines, str(MODEL), "-o", str(program)], check=True)
    # Kernels that randomise addresses widely break ThreadSanitizer's memory layout; setarch -R turns that off.
    fixed_addresses = ["setarch", "-R"] if shutil.which("setarch") else []
    env = os.environ | {"TSAN_OPTIONS": "exitcode=66 halt_on_error=0"}
    return subprocess.run(
        [*fixed_addresses, str(program)], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_whole_protocol_has_no_race_and_right_sums(tmp_path: Path) -> None:
    result = run_model(tmp_path, WHOLE)
    assert (result.returncode, result.stdout, result.stderr) == (0, "wrong sums: 0, steps: 4, arrivals: 0\n", "")


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_race_is_reported_without(what: str, tmp_path: Path) -> None:
    result = run_model(tmp_path, WHOLE | LEFT_OUT[what])
    assert result.returncode == 66
    assert "ThreadSanitizer: data race" in result.stderr


@pytest.mark.parametrize("meetings", [1, 2, 3])
@pytest.mark.parametrize("programs", [1, 2, 3, 4])
def test_the_counter_serves_launch_after_launch(programs: int, meetings: int) -> None:
    """Of the lagged step, the exact one and that of amsgrad."""
    assert failure(Protocol(), [programs] * 3, meetings) is None


def test_another_number_of_programs_may_follow() -> None:
    assert failure(Protocol(), [3, 4, 1, 2], meetings=2) is None


@pytest.mark.parametrize("meetings", [2, 3])
def test_a_target_that_does_not_count_the_meetings_before_opens_too_early(meetings: int) -> None:
    protocol = Protocol(target=lambda meeting, programs: programs - 1)
    assert "before all have arrived" in failure(protocol, [3], meetings)
    if meetings == 3:
        protocol = Protocol(target=lambda meeting, programs: programs)
        assert "before all have arrived" in failure(protocol, [3], meetings)


def test_a_last_one_that_forgets_the_meetings_before_is_not_the_last() -> None:
    protocol = Protocol(finds_itself_last=lambda before, meeting, programs: before == programs)
    assert "finishes the work before all" in failure(protocol, [3], meetings=2)


def test_a_last_one_that_counts_wrong_leaves_the_work_undone() -> None:
    protocol = Protocol(finds_itself_last=lambda before, meeting, programs: before == meeting * programs)
    assert "0 programs finish the work" in failure(protocol, [3], meetings=2)


def test_a_counter_that_is_not_set_back_fails_in_the_next_launch() -> None:
    assert "launch 1 of 3 programs from 6" in failure(Protocol(resets=False), [3, 3], meetings=2)


def test_a_launch_that_was_cut_short_leaves_a_counter_that_must_be_set_back() -> None:
    assert failure(Protocol(), [4], meetings=2, start=2) is not None
