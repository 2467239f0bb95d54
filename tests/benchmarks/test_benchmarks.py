"""The benchmarks work and compare what they say. Nothing here looks at a time."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import (
    busy_machine,
    cliffs,
    collective_cost,
    early_decay,
    gpu,
    host_work,
    memory,
    mixed_precision,
    plot_busy_machine,
    plot_cliffs,
    plot_sharded_step,
    plot_step_time,
    plot_training_memory,
    roofline,
    sharded_step,
    step_time,
    timing,
    training_loops,
)
from benchmarks.conditions import read_rows
from benchmarks.contenders import CONTENDERS as ALL_CONTENDERS
from benchmarks.contenders import GPU_CONTENDERS as ALL_GPU_CONTENDERS
from benchmarks.contenders import TORCHAO, Contender, parameters, selected, taking_part
from benchmarks.suites import SUITES, Suite
from benchmarks.timing import Quartiles, interleaved_order

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"

# Compiling takes torchao minutes, so one test does.
CONTENDERS = tuple(contender for contender in ALL_CONTENDERS if contender.name != TORCHAO)
GPU_CONTENDERS = tuple(contender for contender in ALL_GPU_CONTENDERS if contender.name != TORCHAO)


@pytest.fixture
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- What is measured


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
def test_contender_steps(contender: Contender) -> None:
    params = parameters([(7, 5), (3,), (20, 300)])
    step = contender.build(params)
    for _ in range(2):
        before = [param.detach().clone() for param in params]
        step()
        assert all((param != old).all() and param.isfinite().all() for param, old in zip(params, before, strict=True))


@pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")  # what it and the compiler have to say
def test_torchao_steps() -> None:
    (contender,) = (contender for contender in ALL_CONTENDERS if contender.name == TORCHAO)
    (param,) = parameters([(64, 64)])
    step, before = contender.build([param]), param.detach().clone()
    step()
    assert (param != before).all()


def test_contender_names_and_peers() -> None:
    names = [contender.name for contender in CONTENDERS]
    assert len(set(names)) == len(names)
    assert {contender.peer for contender in CONTENDERS} <= set(names)
    for contender in CONTENDERS:
        assert ("clip" in contender.peer) == ("clip" in contender.name)


def test_selection_brings_the_peers() -> None:
    assert [c.name for c in selected(["authors"])] == ["AdamW fused", "authors' loop"]
    with pytest.raises(ValueError, match="No contender"):
        selected(["no such thing"])


def test_gradients_have_norm_one() -> None:
    params = parameters([(500,)] * 20)
    norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    assert norm == pytest.approx(1, rel=0.05)


def test_every_order_has_every_item_and_all_take_the_lead() -> None:
    orders = [interleaved_order("abcd", repetition) for repetition in range(8)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert sorted(order[0] for order in orders) == sorted(2 * "abcd")


def test_quartiles() -> None:
    assert Quartiles.of([5, 1, 4, 2, 3]) == Quartiles(2, 3, 4)
    assert Quartiles.of([7]) == Quartiles(7, 7, 7)


# --- The commands

STEP_TIME_COLUMNS = {
    *(
        "suite",
        "contender",
        "backend",
        "elements",
        "tensors",
        "dtype",
        "threads",
        "repeats",
        "median_s",
        "q1_s",
        "q3_s",
    ),
    *(
        "bytes_per_element",
        "gb_per_s",
        "peak_gb_per_s",
        "share_of_peak",
        "ratio",
        "peer",
        "torch",
        "swd_fused",
        "python",
        "cpu",
        "cores",
        "device",
    ),
    *("huge_pages", "other_load", "date"),
}


@pytest.mark.usefixtures("_keep_threads")
def test_step_time_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(step_time, "CONTENDERS", CONTENDERS)
    monkeypatch.setitem(SUITES, "tiny", Suite(((5, 3), (7,)), repeats=99))
    step_time.main(["--suite", "tiny", "--repeats", "2", "--threads", "1", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "step_time.csv")
    assert taking_part(CONTENDERS, SUITES["one-1M"].shapes) == list(CONTENDERS)
    without_codes = [c.name for c in CONTENDERS if not c.name.endswith("8bit (cpu)")]  # tensors are too small for them
    assert [row["contender"] for row in rows] == without_codes
    for row in rows:
        assert set(row) == STEP_TIME_COLUMNS
        assert (row["suite"], row["elements"], row["tensors"], row["repeats"]) == ("tiny", "22", "2", "2")
        assert 0 < float(row["q1_s"]) <= float(row["median_s"]) <= float(row["q3_s"])
        if row["contender"] == row["peer"]:
            assert float(row["ratio"]) == 1
        if row["bytes_per_element"]:
            gb_per_s = float(row["bytes_per_element"]) * 22 / float(row["median_s"]) / 1e9
            assert float(row["gb_per_s"]) == pytest.approx(gb_per_s)
    assert (tmp_path / "step_time.png").read_bytes().startswith(PNG)
    assert "tiny: 22 elements in 2 tensors" in capsys.readouterr().out


def test_step_time_on_a_gpu_needs_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        step_time.main(["--device", "cuda"])
    assert exit_info.value.code == 2
    assert "--device cuda: torch" in (message := capsys.readouterr().err)
    assert "finds no CUDA or ROCm GPU here" in message


@pytest.mark.usefixtures("_keep_threads")
def test_step_time_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as that goes without one: its contenders, interpreted, by the host's clock."""
    monkeypatch.setattr(step_time, "GPU_CONTENDERS", GPU_CONTENDERS)
    monkeypatch.setitem(SUITES, "tiny", Suite(((5, 3), (7,)), repeats=1))
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu, "timed", timing.timed)
    monkeypatch.setattr(gpu, "peak_here", lambda: 100.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(step_time, "parameters", lambda shapes, device: parameters(shapes))
    step_time.main(["--device", "cuda", "--suite", "tiny", "--threads", "1", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "step_time.csv")
    assert [row["contender"] for row in rows] == [
        c.name for c in GPU_CONTENDERS if not c.name.endswith("8bit (triton)")
    ]
    for row in rows:
        assert row["device"] == "Some GPU"
        if row["gb_per_s"]:
            assert float(row["share_of_peak"]) == pytest.approx(float(row["gb_per_s"]) / 100)
    assert "peak 100 GB/s" in capsys.readouterr().out


def test_peak_bandwidth() -> None:
    """From clock and bus width; AMD's memory transfers more often than its clock tells."""
    assert gpu.peak_gb_per_s("NVIDIA RTX 6000 Ada", 10_001_000, 384) == pytest.approx(960, rel=1e-3)
    assert gpu.peak_gb_per_s("NVIDIA A100-SXM4-40GB", None, None) == 1555
    assert gpu.peak_gb_per_s("AMD Instinct MI300X", 1_300_000, 8192) == 5300
    assert gpu.peak_gb_per_s("AMD Instinct MI250X/MI250", None, None) == 1638.4
    assert gpu.peak_gb_per_s("NVIDIA H200", 3_201_000, 6144) == 4800
    assert gpu.peak_gb_per_s("NVIDIA GH200 480GB", 2_619_000, 6144) == pytest.approx(4022, rel=1e-3)
    assert gpu.peak_gb_per_s("Some GPU", None, None) is None
    for name, clock, bus in (("A100-SXM4-40GB", 1_215_000, 5120), ("H100 80GB HBM3", 2_619_000, 5120)):
        assert gpu.peak_gb_per_s("", clock, bus) == pytest.approx(gpu.PEAKS[name], rel=1e-2)


def test_host_work_command(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.host_work", "--tensors", "5", "--repeats", "3", "--out", tmp_path]
    subprocess.run(command, env=env, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=300)
    rows = rows_of(tmp_path / "host_work.csv")
    assert [row["contender"] for row in rows] == 2 * [contender.name for contender in host_work.CONTENDERS]
    for row in rows:
        assert (row["tensors"], row["repeats"]) == ("5", "3")
        assert 0 < float(row["q1_s"]) <= float(row["median_s"]) <= float(row["q3_s"])


def test_host_work_is_not_that_of_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_work.main([])
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err


@pytest.mark.usefixtures("_keep_threads")
def test_training_loops_command(tmp_path: Path) -> None:
    """Without time left for more, there are five rounds."""
    arguments = ["--model", "MLP", "--threads", "1", "--repeats", "9", "--budget", "0", "--out", str(tmp_path)]
    training_loops.main(arguments)
    rows = rows_of(tmp_path / "training_loops.csv")
    assert [row["contender"] for row in rows] == [contender.name for contender in training_loops.CONTENDERS]
    medians = {row["contender"]: float(row["median_s"]) for row in rows}
    for row in rows:
        assert (row["model"], row["parameters"], row["threads"], row["repeats"]) == ("MLP", "5702", "1", "5")
        own, peer, rest = medians[row["contender"]], medians[row["peer"]], float(row["forward_backward_s"])
        assert float(row["ratio"]) == pytest.approx(own / peer)
        assert float(row["whole_ratio"]) == pytest.approx((rest + own) / (rest + peer))


def test_sharded_step_command(tmp_path: Path) -> None:
    sharded_step.main(["--suite", "one-1M", "--ranks", "2", "--repeats", "2", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "sharded_step.csv")
    assert [row["contender"] for row in rows] == list(sharded_step.CONTENDERS)
    for row in rows:
        assert (row["ranks"], row["suite"], row["elements"], row["repeats"]) == ("2", "one-1M", str(2**20), "2")
        assert 0 < float(row["q1_s"]) <= float(row["median_s"]) <= float(row["q3_s"])
        if row["contender"] == row["peer"]:
            assert (float(row["ratio"]), float(row["added_s"])) == (1, 0)
    assert (tmp_path / "sharded_step.png").read_bytes().startswith(PNG)


def test_the_latency_model_by_hand() -> None:
    """8 GPUs in a chain, 12,500 nodes in a tree, there and back."""
    nccl = collective_cost.FABRICS["NCCL's constants"]
    assert collective_cost.all_reduce_us(8, nccl) == pytest.approx(6.8 + 14 * 0.6)
    assert collective_cost.all_reduce_us(16, nccl) == pytest.approx(6.8 + 14 * 0.6 + 2 * 5)
    assert collective_cost.all_reduce_us(100_000, nccl) == pytest.approx(6.8 + 14 * 0.6 + 10 * 13.6096, rel=1e-4)
    assert collective_cost.all_reduce_us(1, nccl) == 6.8


def test_collective_cost_command_and_page(tmp_path: Path) -> None:
    """The page states what the command prints."""
    collective_cost.main(["--out", str(tmp_path)])
    assert (tmp_path / "collective_cost.png").read_bytes().startswith(PNG)
    rows = rows_of(tmp_path / "collective_cost.csv")
    page = (Path(__file__).parents[2] / "docs" / "collective.md").read_text()
    order = ["FSDP, exact", "TP + FSDP, exact", "TP + FSDP, lagged", "FSDP, lagged", "DDP; sum known"]
    for fabric in collective_cost.FABRICS:
        for ranks in (8, 1_000, 100_000):
            own = {r["way"]: float(r["waits_us"]) for r in rows if (r["fabric"], r["ranks"]) == (fabric, str(ranks))}
            assert f"| {ranks:,} | " + " | ".join(f"{own[way]:.0f}" for way in order) + " |" in page


@pytest.mark.usefixtures("_keep_threads")
def test_mixed_precision_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting has torch's best first, to which the others are compared."""
    monkeypatch.setitem(SUITES, "one-1M", Suite(((300,), (80, 64)), repeats=1))
    mixed_precision.main(["--suite", "one-1M", "--repeats", "2", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "mixed_precision.csv")
    settings = {"float32", "kinds of decay, float32", "float32 with clipping"}
    settings |= {"bfloat16 with masters", "float16 with GradScaler"}
    assert {row["setting"] for row in rows} == settings
    assert all(float(row["ratio"]) == 1.0 for row in rows if row["contender"] == row["peer"])
    assert sum("FusedAdamS" in row["contender"] for row in rows) == 10


def test_memory_is_that_of_the_page(tmp_path: Path) -> None:
    memory.main(["--out", str(tmp_path)])
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    rows = {row["choice"]: row for row in rows_of(tmp_path / "memory.csv")}
    assert len(rows) == len(memory.CHOICES)
    for name in ("float32", "float32, first moment bfloat16", "bfloat16, master weights"):
        sizes = (f"{float(rows[name][column]):g}" for column in ("parameter", "gradient", "state", "all"))
        assert f"| {name} | {' | '.join(sizes)} |" in page


def test_memory_is_whole_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    memory.main(["--out", str(tmp_path)])
    printed = capsys.readouterr().out.partition("Wrote")[0]
    assert printed
    assert "…" not in printed
    words = set(printed.split())
    assert {"choice", "parameter", "gradient", "state", "all"} <= words
    for row in rows_of(tmp_path / "memory.csv"):
        assert {*row["choice"].split(), *(f"{float(row[size]):g}" for size in ("parameter", "state", "all"))} <= words
    assert max(map(len, printed.splitlines())) <= 80


def test_memory_of_training_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW keeps all gradients, gradient release those that wait to be stepped together; peers need their packages."""
    chosen = ["float32: AdamW fused", "float32: FusedAdamS lagged, gradients released"]
    chosen += ["float32: FusedAdamS exact, 8bit", "FlashAdamW"]
    settings = [argument for name in chosen for argument in ("--setting", name)]
    memory.main(["--measure", "--model", "tiny", "--out", str(tmp_path), *settings])
    rows = {row["setting"]: row for row in rows_of(tmp_path / "training_memory.csv")}
    assert list(rows) == chosen[:3]
    for name, row in rows.items():
        assert (int(row["parameters"]), row["tokens"]) == (4 * int(row["elements"]), "32")
        if "8bit" in name:  # rows of 64, so scales take more than for large models, and small tensors stay in float32
            assert 2 < int(row["state"]) / int(row["elements"]) < 2.5
        else:
            assert 0 <= int(row["state"]) - 8 * int(row["elements"]) < 8 * 1024
        assert int(row["peak"]) >= int(row["parameters"]) + int(row["state"])
    assert rows[chosen[0]]["gradients"] == rows[chosen[0]]["parameters"]
    assert (tmp_path / "training_memory.png").stat().st_size > 0
    assert "Skipped bfloat16: FlashAdamW" in capsys.readouterr().out


def test_the_page_has_the_modelled_times(tmp_path: Path) -> None:
    roofline.main(["--out", str(tmp_path / "roofline.csv")])
    rows = read_rows(tmp_path / "roofline.csv")
    assert read_rows(roofline.RESULTS) == rows
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for size, digits in ((124_000_000, 2), (1_000_000_000, 1)):
        for each in (28, 40, 32, 24):
            own = [row for row in rows if (row["parameters"], row["bytes_per_parameter"]) == (str(size), str(each))]
            times = [f"{float(row['modelled_ms']):.{digits}f}" for row in own[: len(roofline.PEAKS)]]
            assert f"| {each} | " + " | ".join(times) + " |" in page


HELPFUL = [
    step_time,
    plot_step_time,
    host_work,
    memory,
    mixed_precision,
    training_loops,
    sharded_step,
    plot_sharded_step,
    plot_training_memory,
    collective_cost,
    early_decay,
    roofline,
    cliffs,
    plot_cliffs,
    busy_machine,
    plot_busy_machine,
]


@pytest.mark.parametrize("module", HELPFUL)
def test_help(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        module.main(["--help"])  # type: ignore[attr-defined]
    assert exit_info.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--contender", "no such thing"], ["--suite", "none"]])
def test_step_time_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        step_time.main(arguments)
    assert exit_info.value.code == 2
