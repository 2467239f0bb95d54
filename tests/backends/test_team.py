"""The threads of a step exchange data by acquire and release, as ARM needs: x86-64 would forgive more."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEAM = ROOT / "csrc/cpu/team.cpp"


def checked(team: str, folder: Path) -> str:
    """Returns what ThreadSanitizer says. With fixed addresses, since older ones do not know all random ones."""
    (folder / "team.cpp").write_text(team)
    program = folder / "check"
    include = [f"-I{ROOT / 'tests/backends/team_check'}", f"-I{TEAM.parent}"]
    sources = [ROOT / "tests/backends/team_check.cpp", folder / "team.cpp"]
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-fsanitize=thread", "-pthread", *include, *sources, "-o", program], check=True
    )
    result = subprocess.run(["setarch", "-R", program], capture_output=True, text=True, timeout=300, check=False)
    return result.stdout + result.stderr


def test_threads_have_no_races(tmp_path: Path) -> None:
    assert checked(TEAM.read_text(), tmp_path) == "no races\n"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["release", "acq_rel", "acquire"])
def test_a_weaker_order_is_noticed(order: str, tmp_path: Path) -> None:
    weaker = TEAM.read_text().replace(f"memory_order_{order}", "memory_order_relaxed")
    assert "data race" in checked(weaker, tmp_path)
