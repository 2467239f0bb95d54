"""Corrected and cautious decay on a GPU: the largest value of a learning rate that is on the device, in eager steps and
in replays of CUDA graphs, against the torch backend on the CPU. Needs a GPU, or the virtual one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.backends.test_gpu_graphs import SHAPES, Mixed
from tests.device import needs_gpu
from tests.runs import random_grads, random_params, run

pytestmark = [needs_gpu, pytest.mark.backends(without=("torch", "cpu"), split=True)]

KINDS: list[Any] = [
    pytest.param({"corrected_decay": True, "cautious_decay": True, "weight_decay": 0.1}, id="scheduled"),
    pytest.param({"decay": "decoupled", "corrected_decay": True, "largest_lr": 0.02}, id="AdamC, peak given"),
    pytest.param({"decay": "independent", "cautious_decay": True}, id="independent"),
]
LRS = [0.01, 0.03, 0.02, 0.005, 0.04, 0.01]


def so_far(optimizer: FusedAdamS) -> float | Tensor:
    return optimizer.param_groups[0]["largest_lr_so_far"]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:FusedAdamS got lr=")  # above the given peak
@pytest.mark.parametrize("options", KINDS)
def test_replays_and_eager_steps_follow_one_learning_rate(backend: str, options: dict[str, Any]) -> None:
    lr = torch.tensor(0.02)
    mixed = Mixed(backend, {k: v for k, v in options.items() if k != "weight_decay"}, lr)
    replay = mixed.capture()
    for t, value in enumerate(LRS):
        lr.fill_(value)
        mixed.step() if t % 3 == 1 else replay()
        mixed.check()
        assert float(so_far(mixed.optimizer)) == float(so_far(mixed.twin))
    assert float(so_far(mixed.optimizer)) == float(torch.tensor(0.04))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_cannot_begin_to_follow(backend: str) -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params, lr=0.01, backend=backend, corrected_decay=True)
    run(params, random_grads(SHAPES, 1), optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"would set the largest one.* back in each replay"), torch.cuda.graph(graph):
        optimizer.step()
    assert so_far(optimizer) == 0.01
