"""State dicts of 0.2.0 load, and training goes on from them as it did there.

The files hold what 0.2.0 saved after three steps: the optimizer's state dict, the parameters then, and those after
three steps more, with gradients that follow from the number of the step.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS

FILES = sorted((Path(__file__).parent / "saved_by_0_2").glob("*.pt"))


def go_on(optimizer: FusedAdamS) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    for step in range(3, 6):
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in params]


def assert_as_saved(optimizer: FusedAdamS, saved: dict[str, Any]) -> None:
    # The torch backend of 0.2 used torch's fused kernel, which rounds elsewhere.
    tolerance = 1e-6 if saved["options"].get("backend") == "torch" else 0.0
    for param, expected in zip(go_on(optimizer), saved["after"], strict=True):
        torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)
    metrics = optimizer.metrics()
    assert {name: metrics[name] for name in saved["metrics"]} == pytest.approx(saved["metrics"], rel=1e-6, nan_ok=True)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def saved(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(request.param, weights_only=False)
    return loaded


def test_state_dicts_load(saved: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(param.clone()) for param in saved["before"]]
    optimizer = FusedAdamS(params, lr=1e-2, **saved["options"])
    optimizer.load_state_dict(torch.load(io.BytesIO(saved["state_dict"])))
    if optimizer.max_grad_norm is not None:
        saved["metrics"].pop("clipped_share")  # of the steps of one optimizer
    assert_as_saved(optimizer, saved)


def test_there_are_files() -> None:
    assert len(FILES) == 7
