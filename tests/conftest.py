from __future__ import annotations

import pytest
import torch

from swd_fused import backends


def pytest_report_header() -> str:
    cpu = backends.load_cpu_backend()
    return f"swd_fused: cpu backend {cpu if isinstance(cpu, str) else 'built'}, torch {torch.__version__}"


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that must serve CPU tensors. A missing one fails: a test suite without it shows nothing."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
