"""Each instruction set's update of moments in 8 bits against plain loops; the package uses the best one only."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = ["coded_blocks.cpp", "coded_blocks_avx2.cpp", "coded_blocks_avx512.cpp", "blocks.cpp", "float16_arrays.cpp"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    program = tmp_path_factory.mktemp("coded_blocks") / "check"
    include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++20", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]
    sources = [ROOT / "tests/backends/coded_blocks_check.cpp", *(ROOT / "csrc/cpu" / name for name in SOURCES)]
    subprocess.run(["g++", *flags, f"-I{include}", *map(str, sources), "-o", program], check=True)
    return [line.split() for line in subprocess.check_output([program], text=True).splitlines()]


def test_each_instruction_set_stores_the_same_codes(lines: list[list[str]]) -> None:
    """But for one in a thousand, where a sum that is rounded otherwise decides."""
    assert {line[0] for line in lines} >= {"plain"}
    for name, _, codes, _, far, _, params, _, sums in lines:
        assert int(codes) <= 3, name
        assert (far, params, sums) == ("0", "0", "1"), name
