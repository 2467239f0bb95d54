"""Figures on the README and in docs/: step times are those of the one run that is kept."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "results" / "step_time.csv"

SUITES = {
    "one tensor of 64M elements": "one-64M",
    "GPT-2 124M": "gpt2-124m",
    "ResNet-50": "resnet50",
    "one tensor of 1M elements": "one-1M",
    "1000 tensors of 500 elements": "1000x500",
    "one tensor of 100,000 elements": "one-100k",
    "11 tensors of 8,192 elements": "11x8192",
    "one tensor of 10 elements": "one-10",
}
CONTENDERS = {
    "exact": "FusedAdamS exact (cpu)",
    "lagged": "FusedAdamS lagged (cpu)",
    "exact with clipping": "FusedAdamS exact + clip (cpu)",
    "exact, 8 bits": "FusedAdamS exact 8bit (cpu)",
    "lagged, 8 bits": "FusedAdamS lagged 8bit (cpu)",
    '"torch" backend, exact': "FusedAdamS exact (torch)",
    "authors' loop": "authors' loop",
    "torchao `AdamW8bit`": "torchao AdamW8bit",
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables_of_shapes(page: Path) -> list[list[list[str]]]:
    """Returns the tables whose rows are shapes, as lists of cells."""
    tables = re.findall(r"^\| shapes \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), flags=re.MULTILINE)
    heads = re.findall(r"^(\| shapes \|.*)\n", page.read_text(), flags=re.MULTILINE)
    return [[cells(head), *map(cells, rows.strip().split("\n"))] for head, rows in zip(heads, tables, strict=True)]


def test_step_times_are_those_of_one_run() -> None:
    """Each to as many digits as it is given."""
    page = "docs/benchmarks.md"
    (head, *rows) = tables_of_shapes(ROOT / page)[0]
    assert len(tables_of_shapes(ROOT / page)) == 1
    with RUN.open() as file:
        ratios = {(row["suite"], row["contender"]): float(row["ratio"]) for row in csv.DictReader(file)}
    for shapes, *values in rows:
        for column, value in zip(head[1:], values, strict=True):
            measured = ratios.get((SUITES[shapes], CONTENDERS[column]))
            digits = len(value.partition(".")[2])
            assert value == ("" if measured is None else f"{measured:.{digits}f}"), f"{shapes}, {column}"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_steps_in_training_loops_are_those_of_one_run(page: str) -> None:
    """By model: the ratio of the step, and what it adds to the whole training step."""
    with (ROOT / "benchmarks" / "results" / "training_loops.csv").open() as file:
        measured = list(csv.DictReader(file))
    text = (ROOT / page).read_text()
    for model, parameters in {(row["model"], int(row["parameters"])) for row in measured}:
        rows = {row["contender"]: row for row in measured if row["model"] == model}
        chosen = [rows[name] for name in ("exact", "lagged", "exact with clipping")]
        figures = [f"{float(r['ratio']):.2f} ({100 * (float(r['whole_ratio']) - 1):+.1f}%)" for r in chosen]
        assert f"| {model}, {parameters:,} | {' | '.join(figures)} |" in text
