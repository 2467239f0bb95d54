from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from swd_fused import backends
from swd_fused.state import eight_bit
from tests import seconds
from tests.device import DEVICE
from tests.selection import mark_thinned

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.gpu_code import interpreter_bf16, interpreter_speed

    interpreter_bf16.install()
    interpreter_speed.install()


def pytest_report_header() -> str:
    cpu = backends.load_cpu_backend()
    built = cpu if isinstance(cpu, str) else "built"
    return f"swd_fused: device {DEVICE}, cpu backend {built}, torch {torch.__version__}"


def share_cores() -> None:
    """Leaves each of several workers its share of the cores, and programs that tests start.

    Threads that wait for a core make a parallel region take milliseconds: small nets trained for 160 s instead of 20.
    Tests of what depends on the number of threads set it, and so does the fuzz.
    """
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers is not None:
        threads = max(1, (os.cpu_count() or 1) // int(workers))
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def pytest_configure(config: pytest.Config) -> None:
    share_cores()
    if DEVICE != "cpu" and not torch.cuda.is_available():
        raise pytest.UsageError(f"SWD_FUSED_TEST_DEVICE={DEVICE}, but torch {torch.__version__} finds no GPU.")
    config.addinivalue_line(
        "markers",
        "backends(without=(), interpreted=True, split=False): which backends the fixture of that name goes through. "
        "interpreted=False keeps a test out of Triton's interpreter, where it would take long; split=True adds the "
        "Triton backend's passes as launches of their own, of several programs.",
    )
    config.addinivalue_line("markers", "slow: left to `make test-all`.")
    config.addinivalue_line(
        "markers", "thinned: of this test `make test` runs as many cases as have each value of each parameter once."
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each backend that must serve the device. A missing one fails: a test suite without it shows nothing. Those that
    SWD_FUSED_TEST_BACKENDS does not name are left out, where a machine cannot have them or is slow."""
    if "backend" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("backends")
    options = {"without": (), "interpreted": True, "split": False, **(marker.kwargs if marker else {})}
    names = ["torch", "cpu"] if DEVICE == "cpu" else ["torch"]
    if options["interpreted"] or DEVICE != "cpu":
        names += ["triton", "triton-split"] if options["split"] else ["triton"]
    asked = os.environ.get("SWD_FUSED_TEST_BACKENDS", "torch,cpu,triton").split(",")
    names = [name for name in names if name not in options["without"] and name.partition("-")[0] in asked]
    metafunc.parametrize("backend", names, indirect=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Keeps how long each file took, if the Makefile asks for it."""
    name = os.environ.get("SWD_FUSED_KEEP_SECONDS")
    if name is not None:
        reports = [report for found in terminalreporter.stats.values() for report in found]
        seconds.keep(name, (report for report in reports if hasattr(report, "nodeid")))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is marked slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU the tests that are about backends, and its own."""
    mark_thinned(items)
    if DEVICE == "cpu":
        return
    on_device = [item for item in items if "backend" in item.fixturenames or _is_for_gpus(item)]  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=[item for item in items if item not in on_device])
    items[:] = on_device


def _is_for_gpus(item: pytest.Item) -> bool:
    return "test_gpu" in item.nodeid or "virtual_gpu/" in item.nodeid


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name to pass on. Triton's is one name for both ways to launch."""
    name, _, split = request.param.partition("-")
    if name != "triton":
        yield name
        return
    from tests.backends.triton_launches import launches

    # A GPU does not tell of a NaN that it computes.
    with launches(split=bool(split)), np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        yield name


@pytest.fixture
def _interrupts_are_raised() -> Iterator[None]:
    """Also where the shell has started the tests in the background, which then ignore SIGINT."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture
def _codes_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With state_dtype="8bit" also the tensors of small models have 8-bit moments."""
    for name in ("LEAST_NUMEL", "LEAST_VECTOR"):
        monkeypatch.setattr(eight_bit, name, 40)


@pytest.fixture(autouse=True)
def _seed_and_device() -> Iterator[None]:
    with nullcontext() if DEVICE == "cpu" else torch.device(DEVICE):
        torch.manual_seed(0)
        yield
