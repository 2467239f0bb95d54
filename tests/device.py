"""Where the tests run: on the CPU, with Triton's kernels interpreted, unless SWD_FUSED_TEST_DEVICE names a GPU."""

from __future__ import annotations

import os

import pytest

DEVICE = os.environ.get("SWD_FUSED_TEST_DEVICE", "cpu")

if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; compiled code is tested with 0

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA or ROCm GPU, and is run there by `make test-gpu`")
