"""Corrected and cautious decay on a GPU with a learning rate that is on the device, in eager steps and in replays of
CUDA graphs, against the torch backend on the CPU. Needs a GPU, or the virtual one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.test_gpu_graphs import Mixed
from tests.device import needs_gpu

pytestmark = [needs_gpu, pytest.mark.backends(without=("torch", "cpu"), split=True)]

KINDS: list[Any] = [
    pytest.param({"corrected_decay": True, "cautious_decay": True, "weight_decay": 0.1}, id="scheduled"),
    pytest.param({"decay": "decoupled", "corrected_decay": True}, id="AdamC"),
    pytest.param({"decay": "independent", "cautious_decay": True}, id="independent"),
]
PEAK = {"largest_lr": 0.03}
LRS = [0.01, 0.03, 0.02, 0.005, 0.04, 0.01]


@pytest.mark.parametrize("options", KINDS)
def test_replays_and_eager_steps_follow_one_learning_rate(backend: str, options: dict[str, Any]) -> None:
    lr = torch.tensor(0.02)
    mixed = Mixed(backend, {**{k: v for k, v in options.items() if k != "weight_decay"}, **PEAK}, lr)
    replay = mixed.capture()
    for t, value in enumerate(LRS):
        lr.fill_(value)
        mixed.step() if t % 3 == 1 else replay()
        mixed.check()
