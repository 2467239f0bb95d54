from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels run on the CPU here

import pytest
import torch

from swd_fused import backends
from tests.gpu_code import interpreter_bf16, interpreter_speed

if os.environ["TRITON_INTERPRET"] == "1":
    interpreter_bf16.install()
    interpreter_speed.install()


def pytest_report_header() -> str:
    cpu = backends.load_cpu_backend()
    return f"swd_fused: cpu backend {cpu if isinstance(cpu, str) else 'built'}, torch {torch.__version__}"


@pytest.fixture(params=["torch", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that must serve CPU tensors. A missing one fails: a test suite without it shows nothing."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
