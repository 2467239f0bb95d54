"""What looks for slow steps steps what it says, and leaves no busy neighbours. Nothing here looks at a time."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest
import torch
from rich.console import Console
from torch import Tensor

pytest.importorskip("matplotlib")

from benchmarks import busy_machine, cliffs, plot_busy_machine, plot_cliffs
from benchmarks.cliff_cases import CASES, PLAIN, STATES, TINY, TINY_GRADIENTS, UNIT, Source, cells
from benchmarks.conditions import read_rows
from benchmarks.contenders import PEER
from benchmarks.other_load import STAT, OtherLoad

PNG = b"\x89PNG"

BY_NAME = {case.name: case for case in (PLAIN, *CASES)}

# Of one unit: a parameter's shape, its strides, and its gradient's.
MATRIX, CONVOLUTION, POINTWISE = (396, 1024), (64, 704, 3, 3), (396, 1024, 1, 1)
LAYOUTS = {
    "plain": (MATRIX, (1024, 1), (1024, 1)),
    "transposed": (MATRIX, (1, 396), (1, 396)),
    "channels_last 3x3": (CONVOLUTION, (6336, 1, 2112, 704), (6336, 1, 2112, 704)),
    "channels_last 1x1": (POINTWISE, (1024, 1, 1024, 1024), (1024, 1, 1024, 1024)),
    "parameter with gaps": (MATRIX, (2048, 2), (1024, 1)),
    "gradient expanded in rows": (MATRIX, (1024, 1), (1, 0)),
    "gradient expanded in columns": (MATRIX, (1024, 1), (0, 1)),
    "gradient transposed": (MATRIX, (1024, 1), (1, 396)),
    "channels_last 3x3, gradient plain": (CONVOLUTION, (6336, 1, 2112, 704), (6336, 9, 3, 1)),
    **{f"rows of {n}": ((UNIT // n, n), (n, 1), (n, 1)) for n in (16, 64, 72, 264, 576)},
    "one row": ((1, UNIT), (UNIT, 1), (UNIT, 1)),
    "many of 64 x 64": ((64, 64), (64, 1), (64, 1)),
    "gradients of zero": (MATRIX, (1024, 1), (1024, 1)),
    "gradients of 1e-21": (MATRIX, (1024, 1), (1024, 1)),
    "every second row zero": (MATRIX, (1024, 1), (1024, 1)),
}


# --- The cases


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(torch.float32, 1)


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def test_all_layouts_are_looked_at() -> None:
    assert list(LAYOUTS) == list(BY_NAME)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_and_size(name: str, source: Source) -> None:
    params = BY_NAME[name].make(source)
    assert sum(param.numel() for param in params) == UNIT
    assert len(params) == (UNIT // 64**2 if name == "many of 64 x 64" else 1)
    for param in params:
        grad = grad_of(param)
        assert (param.shape, param.stride(), grad.stride()) == LAYOUTS[name]
        assert grad.shape == param.shape
        assert param.dtype == grad.dtype == torch.float32
        assert param.is_leaf
        assert param.requires_grad


def test_contiguity(source: Source) -> None:
    """Both of a case, in the order in which memory is laid out."""
    for name, last in (("transposed", False), ("channels_last 3x3", True), ("channels_last 1x1", True)):
        (param,) = BY_NAME[name].make(source)
        for tensor in (param, grad_of(param)):
            if last:
                assert tensor.is_contiguous(memory_format=torch.channels_last)
            else:
                assert tensor.t().is_contiguous()
            # Of a kernel of 1 x 1 there is but one order, whatever its strides.
            assert tensor.is_contiguous() == (name == "channels_last 1x1")
    (param,) = BY_NAME["parameter with gaps"].make(source)
    assert not param.is_contiguous()
    assert param.untyped_storage().nbytes() == 2 * 4 * UNIT


@pytest.mark.parametrize("name", LAYOUTS)
def test_values(name: str, source: Source) -> None:
    """Weights are the source's everywhere; gradients where the case says nothing else of them."""
    weights, grads = source.weights.clone(), source.grads.clone()
    params = BY_NAME[name].make(source)
    own = torch.cat([param.detach().flatten() for param in params])
    grad = torch.cat([grad_of(param).flatten() for param in params])
    assert torch.equal(own, weights)
    if name == "gradients of zero":
        expected = torch.zeros(UNIT)
    elif name == TINY_GRADIENTS:
        expected = torch.full((UNIT,), TINY)
    elif name == "every second row zero":
        expected = grads.clone()
        expected.view(MATRIX)[::2] = 0
        assert (expected == 0).sum() == UNIT / 2
    elif name == "gradient expanded in rows":
        expected = grads.view(MATRIX)[:, :1].expand(MATRIX).flatten()
    elif name == "gradient expanded in columns":
        expected = grads.view(MATRIX)[:1].expand(MATRIX).flatten()
    else:
        expected = grads
    assert torch.equal(grad, expected)
    # The next case is made of the same numbers.
    assert torch.equal(source.weights, weights)
    assert torch.equal(source.grads, grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_tiny_gradients_are_subnormal(dtype: torch.dtype) -> None:
    (param,) = BY_NAME[TINY_GRADIENTS].make(Source(dtype, 1))
    squares = grad_of(param).double().square()
    assert grad_of(param).dtype == dtype
    assert squares.min() > 0
    assert squares.max() < torch.finfo(torch.float32).tiny


def test_float16_lacks_tiny_gradients_only() -> None:
    assert torch.tensor(TINY, dtype=torch.float16) == 0
    missing = {(state, case) for state in STATES for case in CASES} - set(cells())
    assert {(state.name, case.name) for state, case in missing} == {("float16 masters", TINY_GRADIENTS)}


# --- The commands


@pytest.fixture
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among all that pytest has imported it takes longer than a cell's steps, and there is memory enough here."""
    monkeypatch.setattr(cliffs.gc, "collect", lambda: 0)


@pytest.mark.usefixtures("one_thread", "_no_collection")
def test_cliffs_command(tmp_path: Path) -> None:
    cliffs.main(["--quick", "--state", "amsgrad", "--threads", "1", "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "cliffs.csv")
    assert [row["case"] for row in rows] == [PLAIN.name, *(case.name for case in CASES)]
    for row in rows:
        assert (row["state"], row["dtype"], row["elements"]) == ("amsgrad", "float32", str(UNIT))
        assert (row["repeats"], row["threads"], row["schedule"]) == ("3", "1", "exact")
        assert float(row["ratio"]) == pytest.approx(float(row["median_s"]) / float(row["peer_median_s"]))
        assert row["peer"] == (f"{PEER}, float32" if row["case"] == PLAIN.name else "plain")
    assert (tmp_path / "cliffs.png").read_bytes().startswith(PNG)
    plot_cliffs.main([str(tmp_path / "cliffs.csv"), "--out", str(tmp_path / "new" / "picture.png")])
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(PNG)


@pytest.mark.usefixtures("one_thread", "_no_collection")
def test_cliffs_of_each_state(tmp_path: Path) -> None:
    """Also of float16, which has no gradients of 1e-21: the picture has a gap there."""
    cases = ["--case", "one row", "--case", TINY_GRADIENTS]
    cliffs.main(["--quick", *cases, "--schedule", "lagged", "--threads", "1", "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "cliffs.csv")
    expected = [(state.name, PLAIN.name) for state in STATES]
    expected += [(state.name, case.name) for state, case in cells() if case.name in cases]
    assert sorted((row["state"], row["case"]) for row in rows) == sorted(expected)
    assert {row["schedule"] for row in rows} == {"lagged"}
    assert (tmp_path / "cliffs.png").read_bytes().startswith(PNG)


def test_the_table_of_cliffs_is_whole() -> None:
    common = {"schedule": "exact", "elements": 10 * UNIT, "median_s": 0.12345, "ratio": 123.4}
    rows = [
        {
            **common,
            "factor": c.factor,
            "case": c.name,
            "state": s.name,
            "bytes_per_element": s.bytes_per_element("exact"),
        }
        for s in STATES
        for c in (PLAIN, *CASES)
    ]
    console = Console(file=io.StringIO(), width=cliffs.TABLE_WIDTH)
    console.print(cliffs.table(rows))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "…" not in printed
    assert {word for state in STATES for word in state.name.split()} <= set(printed.split())
    assert all(case.name in printed for case in CASES)


@pytest.mark.usefixtures("one_thread")
def test_busy_machine_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def recorded(command: list[str], stdout: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdout=stdout))
        return started[-1]

    monkeypatch.setattr(busy_machine, "Popen", recorded)
    suite, names = "11x8192", [PEER, "FusedAdamS exact (cpu)", "FusedAdamS lagged (cpu)"]
    busy_machine.main(["--suite", suite, "--neighbours", "0", "1", "--seconds", "0.02", "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "busy_machine.csv")
    assert [(row["neighbours"], row["contender"]) for row in rows] == [(n, name) for n in "01" for name in names]
    means = {(row["neighbours"], row["contender"]): float(row["mean_ms"]) for row in rows}
    for row in rows:
        assert (row["suite"], row["elements"], row["tensors"], row["threads"]) == (suite, str(11 * 8192), "11", "1")
        assert int(row["steps"]) >= busy_machine.LEAST_ROUNDS
        assert float(row["median_ms"]) > 0
        own = means[row["neighbours"], row["contender"]]
        assert float(row["ratio_of_means"]) == pytest.approx(own / means[row["neighbours"], PEER])
    assert len(started) == 1
    assert all(each.returncode is not None for each in started)
    assert (tmp_path / "busy_machine.png").read_bytes().startswith(PNG)
    plot_busy_machine.main([str(tmp_path / "busy_machine.csv"), "--out", str(tmp_path / "new" / "picture.png")])
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(PNG)
    assert "beside busy neighbours, 1 threads" in capsys.readouterr().out


def test_suites_beside_neighbours() -> None:
    sizes = {
        name: (len(shapes), sum(torch.Size(shape).numel() for shape in shapes))
        for name, shapes in busy_machine.SUITES.items()
    }
    small = {"one-100k": (1, 100_000), "11x8192": (11, 11 * 8192), "one-1M": (1, 2**20)}
    assert sizes == {**small, "gpt-2M": (52, 1_984_128)}


def test_neighbours_end_with_what_started_them() -> None:
    """When it fails; at their deadline; and when their parent is another than they were told."""

    started: list[subprocess.Popen[bytes]] = []

    def fail_beside_neighbours() -> None:
        with busy_machine.busy_neighbours(2, 60) as neighbours:
            started.extend(neighbours)
            assert [each.poll() for each in started] == [None, None]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_beside_neighbours()
    assert len(started) == 2
    assert all(each.returncode is not None for each in started)
    for parent, seconds in ((os.getpid(), 0), (os.getpid() + 1, 60)):
        command = [sys.executable, "-I", "-S", "-c", busy_machine.BUSY, str(parent), str(seconds)]
        assert subprocess.run(command, check=True, capture_output=True, timeout=30).stdout == b"."


def test_a_neighbour_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_machine, "BUSY", "print('.')")
    monkeypatch.setattr(busy_machine, "times_within", lambda seconds, steps: sleep(0.5) or [[1.0]] * len(steps))
    with pytest.raises(RuntimeError, match="a neighbour ended before the steps of 11x8192 did"):
        busy_machine.measure("11x8192", [1], 0.01, lambda: None)


@pytest.mark.skipif(not STAT.exists(), reason="the system does not tell how busy it is")
def test_neighbours_are_no_strangers() -> None:
    with busy_machine.busy_neighbours(1, 60) as started:
        without, with_neighbours = OtherLoad(ours=[each.pid for each in started]), OtherLoad()
        sleep(0.5)
        strangers, all_others = without.cores(), with_neighbours.cores()
    assert strangers is not None
    assert all_others is not None
    assert strangers < all_others
