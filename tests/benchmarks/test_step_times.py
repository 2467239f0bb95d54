"""What step times rest on: rounds that take turns, quartiles, ratios, and contenders that step what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest
import torch

from benchmarks import busy_machine, cliffs, collective_cost, gpu, roofline, step_time
from benchmarks.conditions import STAT, OtherLoad, read_rows, write_rows
from benchmarks.early_decay import growth
from benchmarks.step_times import pictures
from benchmarks.step_times.contenders import CONTENDERS, TORCHAO, Contender, parameters, selected
from benchmarks.step_times.harness import Case, Quartiles, interleaved_order, interleaved_times, measure
from benchmarks.step_times.suites import SUITES, Suite
from swd_fused import FusedAdamS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PNG = b"\x89PNG"

# --- The harness


def test_every_order_has_every_item_and_all_take_the_lead() -> None:
    orders = [interleaved_order("abcd", repetition) for repetition in range(8)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert sorted(order[0] for order in orders) == sorted(2 * "abcd")


def test_quartiles() -> None:
    assert Quartiles.of([5, 1, 4, 2, 3]) == Quartiles(2, 3, 4)
    assert Quartiles.of([7]) == Quartiles(7, 7, 7)


def test_rounds_take_turns_and_those_that_warm_up_do_not_count() -> None:
    calls: list[str] = []
    steps: list[Callable[[], object]] = [lambda: calls.append("a"), lambda: calls.append("b")]
    seconds = iter(range(100))

    def timer(step: Callable[[], object]) -> float:
        step()
        return float(next(seconds))

    times = interleaved_times(steps, 3, timer=timer, before=lambda: calls.append("-"))
    assert "".join(calls) == "-b-a-a-b" + "-a-b-b-a-b-a"
    assert times == [[4, 7, 9], [5, 6, 8]]


@pytest.mark.parametrize(("budget", "rounds"), [(0.0, 5), (1e9, 9)])
def test_a_budget_ends_rounds_but_not_the_first_five(budget: float, rounds: int) -> None:
    assert [len(times) for times in interleaved_times([lambda: None] * 2, 9, budget=budget)] == [rounds] * 2


def test_ratios_are_those_of_medians_to_each_ones_peer() -> None:
    seconds = {"peer": [1.0, 2.0, 30.0], "own": [3.0, 3.0, 3.0], "clipped peer": [6.0] * 3, "clipped": [3.0] * 3}
    peers = {"clipped": "clipped peer", "clipped peer": "clipped peer"}
    case = Case("", {"suite": "s"}, dict, 3, peers, times=lambda on_round: seconds)
    rows = measure(case)
    assert [row["contender"] for row in rows] == list(seconds)
    assert [row["ratio"] for row in rows] == [1.0, 1.5, 1.0, 0.5]
    assert [row["peer"] for row in rows] == ["peer", "peer", "clipped peer", "clipped peer"]
    assert {(row["suite"], row["repeats"]) for row in rows} == {("s", 3)}
    assert {"threads", "cpu", "cores", "other_load", "torch", "swd_fused", "date"} <= set(rows[0])


# --- What is stepped


@pytest.mark.parametrize(
    ("name", "elements", "tensors"),
    [
        ("one-64M", 64 * 2**20, 1),
        ("gpt2-124m", 124_439_808, 148),
        ("resnet50", 25_557_032, 161),
        ("one-1M", 2**20, 1),
        ("1000x500", 500_000, 1000),
    ],
)
def test_suite_totals(name: str, elements: int, tensors: int) -> None:
    assert (SUITES[name].elements, len(SUITES[name].shapes)) == (elements, tensors)


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
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


def test_selection_brings_the_peers() -> None:
    assert [c.name for c in selected(["authors"])] == ["AdamW fused", "authors' loop"]
    with pytest.raises(ValueError, match="No contender"):
        selected(["no such thing"])


def test_gradients_have_norm_one() -> None:
    params = parameters([(500,)] * 20)
    norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    assert norm == pytest.approx(1, rel=0.05)


MATRIX, CONVOLUTION = (396, 1024), (64, 704, 3, 3)
LAYOUTS = {
    "transposed": (MATRIX, (1, 396), (1, 396)),
    "channels_last 3x3": (CONVOLUTION, (6336, 1, 2112, 704), (6336, 1, 2112, 704)),
    "channels_last 1x1": ((396, 1024, 1, 1), (1024, 1, 1024, 1024), (1024, 1, 1024, 1024)),
    "parameter with gaps": (MATRIX, (2048, 2), (1024, 1)),
    "gradient expanded in rows": (MATRIX, (1024, 1), (1, 0)),
    "gradient expanded in columns": (MATRIX, (1024, 1), (0, 1)),
    "gradient transposed": (MATRIX, (1024, 1), (1, 396)),
    "channels_last 3x3, gradient plain": (CONVOLUTION, (6336, 1, 2112, 704), (6336, 9, 3, 1)),
}


@pytest.mark.parametrize("factor", cliffs.FACTORS)
def test_cliffs_have_the_plain_steps_size_and_weights(factor: str) -> None:
    """Also that no case changes the numbers of which the next one is made."""
    source = cliffs.Source(torch.float32, 1)
    weights, grads = source.weights.clone(), source.grads.clone()
    for name, make in cliffs.FACTORS[factor].items():
        params = make(source)
        assert torch.equal(torch.cat([param.detach().flatten() for param in params]), weights), name
        if factor == "layout":
            (param,) = params
            assert param.grad is not None
            assert (param.shape, param.stride(), param.grad.stride()) == LAYOUTS[name]
    assert torch.equal(source.weights, weights)
    assert torch.equal(source.grads, grads)


def test_squares_of_tiny_gradients_are_subnormal() -> None:
    (param,) = cliffs.FACTORS["values"][cliffs.TINY_GRADIENTS](cliffs.Source(torch.bfloat16, 1))
    assert param.grad is not None
    squares = param.grad.double().square()
    assert squares.min() > 0
    assert squares.max() < torch.finfo(torch.float32).tiny
    assert not cliffs.exists_in(cliffs.TINY_GRADIENTS, torch.float16)
    assert torch.tensor(cliffs.TINY, dtype=torch.float16) == 0


# --- Neighbours


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def popen(command: list[str], stdout: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdout=stdout))
        return started[-1]

    monkeypatch.setattr(busy_machine, "Popen", popen)
    yield started


def fail_beside_neighbours() -> None:
    with busy_machine.busy_neighbours(2, 60) as pids:
        assert len(pids) == 2
        raise KeyboardInterrupt


def test_neighbours_end_with_what_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it fails; at their deadline; and when their parent is another than they were told."""
    with recorded(monkeypatch) as started:
        with pytest.raises(KeyboardInterrupt):
            fail_beside_neighbours()
        assert len(started) == 2
        assert all(each.returncode is not None for each in started)
    for parent, seconds in ((os.getpid(), 0), (os.getpid() + 1, 60)):
        command = [sys.executable, "-I", "-S", "-c", busy_machine.BUSY, str(parent), str(seconds)]
        assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == b"."


def test_a_neighbour_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_machine, "BUSY", "print('.')")
    with (
        recorded(monkeypatch) as started,
        pytest.raises(RuntimeError, match="a neighbour ended"),
        busy_machine.busy_neighbours(1, 60),
    ):
        started[0].wait()


@pytest.mark.skipif(not STAT.exists(), reason="the system does not tell how busy it is")
def test_neighbours_are_no_strangers() -> None:
    with busy_machine.busy_neighbours(1, 60) as pids:
        without, with_neighbours = OtherLoad(ours=pids), OtherLoad()
        sleep(0.5)
        strangers, all_others = without.cores(), with_neighbours.cores()
    assert strangers is not None
    assert all_others is not None
    assert strangers < all_others


# --- Files, pictures and models


def test_step_time_command_writes_what_the_stored_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On tensors that are too small for moments in 8 bits."""
    monkeypatch.setitem(SUITES, "tiny", Suite(((5, 3), (7,)), repeats=99))
    threads = str(torch.get_num_threads())
    step_time.main(
        ["--suite", "tiny", "--contender", "(cpu)", "--repeats", "2", "--threads", threads, "--out", str(tmp_path)]
    )
    rows = read_rows(tmp_path / "step_time.csv")
    ours = [c.name for c in CONTENDERS if "AdamW fused" in c.name or c.name.endswith("(cpu)")]
    assert [row["contender"] for row in rows] == [name for name in ours if "8bit" not in name]
    assert set(rows[0]) == set(read_rows(RESULTS / "step_time.csv")[0])
    for row in rows:
        gb_per_s = float(row["bytes_per_element"]) * 22 / float(row["median_s"]) / 1e9
        assert float(row["gb_per_s"]) == pytest.approx(gb_per_s)
    assert (tmp_path / "step_time.png").read_bytes().startswith(PNG)
    assert "tiny: 22 elements in 2 tensors" in capsys.readouterr().out


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_stored_results_can_be_drawn_again(name: str, tmp_path: Path) -> None:
    picture = pictures.PICTURES[name](RESULTS / f"{name}.csv", tmp_path / "new" / "picture.png")
    assert picture.read_bytes().startswith(PNG)


def test_a_file_of_rows_is_whole_or_not_there(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", [{"a": 1, "b": "x, y"}])
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        write_rows(tmp_path / "rows.csv", [{"a": 2, "b": ""}, {"c": 3}])
    assert read_rows(tmp_path / "rows.csv") == [{"a": "1", "b": "x, y"}]


def test_host_work_command(tmp_path: Path) -> None:
    """In a process whose kernels are not interpreted."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.host_work", "--tensors", "5", "--repeats", "3", "--out", tmp_path]
    subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, timeout=300)
    rows = read_rows(tmp_path / "host_work.csv")
    assert {row["gradients"] for row in rows} == {"where they were", "at new addresses"}
    assert set(rows[0]) == set(read_rows(RESULTS / "host_work.csv")[0])


def test_peak_bandwidth() -> None:
    """From clock and bus width; AMD's memory transfers more often than its clock tells."""
    assert gpu.peak_gb_per_s("NVIDIA RTX 6000 Ada", 10_001_000, 384) == pytest.approx(960, rel=1e-3)
    assert gpu.peak_gb_per_s("AMD Instinct MI300X", 1_300_000, 8192) == 5300
    assert gpu.peak_gb_per_s("Some GPU", None, None) is None


def test_the_latency_model_by_hand_and_on_its_page() -> None:
    """8 GPUs in a chain, 12,500 nodes in a tree, there and back."""
    nccl = collective_cost.FABRICS["NCCL's constants"]
    assert collective_cost.all_reduce_us(8, nccl) == pytest.approx(6.8 + 14 * 0.6)
    assert collective_cost.all_reduce_us(16, nccl) == pytest.approx(6.8 + 14 * 0.6 + 2 * 5)
    assert collective_cost.all_reduce_us(100_000, nccl) == pytest.approx(6.8 + 14 * 0.6 + 10 * 13.6096, rel=1e-4)
    rows = [{key: str(value) for key, value in row.items()} for row in collective_cost.predictions()]
    assert rows == read_rows(RESULTS / "collective_cost.csv")


def test_the_modelled_times_are_the_stored_ones() -> None:
    rows = [{key: str(value) for key, value in row.items()} for row in roofline.modelled([124e6, 1e9])]
    assert rows == read_rows(RESULTS / "roofline.csv")


def test_the_decay_cannot_grow_faster_than_by_zero_gradients() -> None:
    """What benchmarks.early_decay says of later steps follows from this bound."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = FusedAdamS([param], eps=1e-30)
    decays = []
    for grad in [1.0, 2.0, 3.0, *[0.0] * 17]:
        param.grad = torch.full_like(param, grad)
        optimizer.step()
        decays += optimizer.effective_weight_decay()
    assert decays[19] / decays[2] == pytest.approx(growth(3, until=20), rel=1e-9)
