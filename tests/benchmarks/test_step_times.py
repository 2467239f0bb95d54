"""What step times rest on: rounds that take turns, ratios to the right peer, contenders that step what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.conditions import read_rows
from benchmarks.step_times import pictures
from benchmarks.step_times.authors_loop import AuthorsLoop
from benchmarks.step_times.contenders import CONTENDERS, TORCHAO, Contender, parameters
from benchmarks.step_times.harness import Case, Quartiles, interleaved_order, interleaved_times, measure, quartiles
from swd_fused import FusedAdamS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PNG = b"\x89PNG"

# --- The harness


def test_every_order_has_every_item_and_all_take_the_lead() -> None:
    orders = [interleaved_order("abcd", repetition) for repetition in range(8)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert sorted(order[0] for order in orders) == sorted(2 * "abcd")
    assert quartiles([5, 1, 4, 2, 3]) == Quartiles(2, 3, 4)


def test_rounds_take_turns_and_those_that_warm_up_do_not_count() -> None:
    calls: list[str] = []
    seconds = iter(range(100))

    def timer(step: Callable[[], object]) -> float:
        step()
        return float(next(seconds))

    steps = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = interleaved_times(steps, 3, timer=timer, before=lambda: calls.append("-"))
    assert "".join(calls) == "-b-a-a-b" + "-a-b-b-a-b-a"
    assert times == {"a": [4, 7, 9], "b": [5, 6, 8]}


@pytest.mark.parametrize(("budget", "rounds"), [(0.0, 5), (1e9, 9)])
def test_a_budget_ends_rounds_but_not_the_first_five(budget: float, rounds: int) -> None:
    times = interleaved_times({"a": lambda: None, "b": lambda: None}, 9, budget=budget)
    assert [len(own) for own in times.values()] == [rounds] * 2


def test_ratios_are_those_of_medians_to_each_ones_peer() -> None:
    seconds = {"peer": [1.0, 2.0, 30.0], "own": [3.0, 3.0, 3.0], "clipped peer": [6.0] * 3, "clipped": [3.0] * 3}
    peers = {"clipped": "clipped peer", "clipped peer": "clipped peer"}
    builds = dict.fromkeys(seconds, lambda _: lambda: None)
    case = Case("", {"suite": "s"}, builds, 3, peers=peers, times=lambda *_: seconds)
    rows = measure(case)
    assert [row["contender"] for row in rows] == list(seconds)
    assert [row["ratio"] for row in rows] == [1.0, 1.5, 1.0, 0.5]
    assert {"threads", "cpu", "cores", "other_load", "torch", "swd_fused", "date"} <= set(rows[0])
    assert list(case.only(["own"]).contenders) == ["peer", "own"]
    assert list(case.only(["CLIPPED"]).contenders) == ["clipped peer", "clipped"]


# --- What is stepped


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("contender", CONTENDERS.values(), ids=lambda contender: contender.name)
def test_contender_steps_all_parameters(contender: Contender) -> None:
    if contender.name == TORCHAO:
        pytest.skip("compiling takes torchao minutes")
    params = parameters([(7, 5), (3,), (20, 300)])
    step = contender.build(params)
    for _ in range(2):
        before = [param.detach().clone() for param in params]
        step()
        assert all((param != old).all() and param.isfinite().all() for param, old in zip(params, before, strict=True))
    assert ("clip" in contender.peer) == ("clip" in contender.name)
    assert ("lerp" in contender.peer) == ("lerp" in contender.name or "average" in contender.name)


@pytest.mark.filterwarnings("ignore:weight_decay=")  # it acts like 10 here
@pytest.mark.parametrize(("eps", "allowed"), [(0.0, 1e-13), (1e-8, 2e-6)])
def test_the_authors_loop_is_adams_but_for_eps_in_the_schedule(eps: float, allowed: float) -> None:
    """1e-8 beside an rms of 1e-3 weakens a decay of 1% by 1e-5 of itself: 1e-7 of a weight in each of 10 steps."""
    trained = []
    for make in (AuthorsLoop, FusedAdamS):
        random = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in ((40, 30), (11,))]
        groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
        optimizer = make(groups, weight_decay=1e-2, eps=eps)
        for _ in range(10):
            for param in params:
                param.grad = 1e-3 * torch.randn(param.shape, generator=random, dtype=torch.float64)
            optimizer.step()
        trained.append(torch.cat([param.detach().flatten() for param in params]))
    difference = (trained[0] - trained[1]).abs().max()
    assert difference < allowed
    assert difference > 5e-7 or not eps


# --- Commands, files and pictures


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("step_time", "one-1M"),
        ("training_loops", "MLP"),
        ("mixed_precision", "bfloat16"),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_commands_write_what_the_stored_runs_have(name: str, case: str, tmp_path: Path) -> None:
    main = import_module(f"benchmarks.{name}").main
    main(["--quick", "--case", case, "--threads", "1", "--budget", "0.05", "--out", str(tmp_path)])
    rows, stored = read_rows(tmp_path / f"{name}.csv"), read_rows(RESULTS / f"{name}.csv")
    assert set(rows[0]) == set(stored[0])
    for row in rows:
        peers = [r for r in rows if r["contender"] == row["peer"]]
        assert float(row["ratio"]) == pytest.approx(float(row["median_s"]) / float(peers[0]["median_s"]))
    with pytest.raises(SystemExit, match=re.escape("No case has such a title or contender. There are\n    ")):
        main(["--quick", "--case", "no such thing", "--threads", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host_work", "sharded_step"])
def test_commands_of_other_processes_write_what_the_stored_runs_have(name: str, tmp_path: Path) -> None:
    """Kernels are not interpreted there."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", tmp_path]
    subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, timeout=300)
    assert set(read_rows(tmp_path / f"{name}.csv")[0]) == set(read_rows(RESULTS / f"{name}.csv")[0])


@pytest.mark.slow
def test_pytest_benchmark_answers_the_question() -> None:
    command = [sys.executable, "-m", "pytest", "benchmarks/test_step_time.py", "-k", "1000x500"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of xdist
    done = subprocess.run(command, cwd=ROOT, env=alone, check=True, capture_output=True, text=True, timeout=600)
    printed = done.stdout
    assert re.search(r"1000x500: exact / AdamW fused = \d\.\d\d, claim 1.05; with clipping \d\.\d\d\n", printed)
    assert max(len(line) for line in printed.splitlines() if line.startswith(("test_", "---", "1000x"))) <= 100


@pytest.mark.parametrize("name", ["step_time", "sharded_step"])
def test_stored_results_can_be_drawn_again(name: str, tmp_path: Path) -> None:
    picture = getattr(pictures, f"plot_{name}")(RESULTS / f"{name}.csv", tmp_path / "new" / "picture.png")
    assert picture.read_bytes().startswith(PNG)


def test_peak_bandwidth() -> None:
    """From clock and bus width; AMD's memory transfers more often than its clock tells."""
    assert gpu.peak_gb_per_s("NVIDIA RTX 6000 Ada", 10_001_000, 384) == pytest.approx(960, rel=1e-3)
    assert gpu.peak_gb_per_s("AMD Instinct MI300X", 1_300_000, 8192) == 5300
    assert gpu.peak_gb_per_s("NVIDIA GH200 480GB", None, None) is None
