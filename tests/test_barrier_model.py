"""The grid barrier: its memory order under ThreadSanitizer, its counter in every order of the programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .gpu_code.barrier_counter import failure, next_multiple

MODEL = Path(__file__).parent / "gpu_code" / "barrier_model.cpp"
WHOLE = {
    "ARRIVE_ORDER": "memory_order_release",
    "WAIT_ORDER": "memory_order_acquire",
    "BARRIER_BEFORE": "1",
    "BARRIER_AFTER": "1",
}
LEFT_OUT = {
    "the release": {"ARRIVE_ORDER": "memory_order_relaxed"},
    "the acquire": {"WAIT_ORDER": "memory_order_relaxed"},
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
    assert (result.returncode, result.stdout, result.stderr) == (0, "wrong sums: 0\n", "")


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_race_is_reported_without(what: str, tmp_path: Path) -> None:
    result = run_model(tmp_path, WHOLE | LEFT_OUT[what])
    assert result.returncode == 66
    assert "ThreadSanitizer: data race" in result.stderr


@pytest.mark.parametrize("programs", [1, 2, 3, 4, 5])
def test_the_counter_serves_launch_after_launch(programs: int) -> None:
    assert failure(next_multiple(bits=64), [programs] * 4) is None


def test_the_counter_must_not_go_round_unless_the_number_of_programs_divides_its_range() -> None:
    """Why it has 64 bits: 32 of them are full after 5 million steps of 800 programs. Four bits show it at once."""
    assert failure(next_multiple(bits=64), [3] * 8) is None
    assert "launch 5 of 3 programs from 15" in failure(next_multiple(bits=4), [3] * 8)
    assert "launch 5 of 3 programs from 15" in failure(next_multiple(bits=4, signed_difference=True), [3] * 8)
    assert "launch 3 of 4 programs from 12" in failure(next_multiple(bits=4), [4] * 8)
    assert failure(next_multiple(bits=4, signed_difference=True), [4] * 8) is None


def test_another_number_of_programs_needs_a_counter_of_its_own_or_a_fresh_one() -> None:
    assert "launch 1 of 4 programs from 3" in failure(next_multiple(bits=64), [3, 4])
    assert failure(next_multiple(bits=64), [4], start=0) is None


def test_a_launch_that_was_cut_short_leaves_a_counter_that_must_be_reset() -> None:
    assert failure(next_multiple(bits=64), [4], start=2) is not None
