"""Offload of random models with random options, through random events: bit for bit an ordinary optimizer whose tensors
are where the offloaded one has its state."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from swd_fused.step import overlap
from swd_fused.tensors import twins
from tests.backends.offloaded_run import Run, assert_same_bits
from tests.device import DEVICE, needs_gpu

pytestmark = needs_gpu

STEPS = 6


def random_options(choose: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"decay": choose.choice(["scheduled", "scheduled", "decoupled", "l2"])}
    needs_norm = choose.random() < 0.3
    if needs_norm:
        options |= choose.choice([{"max_grad_norm": 0.05}, {"skip_nonfinite": True}])
    elif options["decay"] == "scheduled" and choose.random() < 0.6:
        options["schedule"] = "lagged"
    if options["decay"] == "scheduled" and choose.random() < 0.2:
        options |= {"adamw_weight_decay": 0.1, "calibration_steps": 2}
    options["amsgrad"] = choose.random() < 0.25
    options["maximize"] = choose.random() < 0.25
    options["dtype"] = choose.choice([torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float64])
    if options["dtype"] is torch.bfloat16:
        options |= choose.choice([{"master_weights": True}, {"stochastic_rounding": True}, {}])
    options["state_dtype"] = choose.choice([None, None, torch.bfloat16, "8bit"])
    return options


def after_step(run: Run, event: str) -> None:
    if event == "others write":
        with torch.no_grad():
            for param in run.params[::2]:
                param.mul_(0.5)
    elif event == "load":
        saved = copy.deepcopy(run.optimizer.state_dict())
        run.optimizer = run.new_optimizer()
        run.optimizer.load_state_dict(saved)
    elif event == "drop":
        run.backward([None] * (len(run.params) - 1) + run.grads(77)[-1:])
        run.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:.*8bit.*none can have")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("_codes_of_small_tensors")
def test_random_runs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slots, chunks and copies on the way of any size, and of small tensors all, some or none on the GPU."""
    choose = random.Random(seed)
    monkeypatch.setattr(overlap, "SLOT_BYTES", choose.choice([1 << 6, 1 << 10, 1 << 13, 1 << 20]))
    monkeypatch.setattr(overlap, "SLOTS", choose.choice([1, 2, 3]))
    monkeypatch.setattr(twins, "MOST_BYTES_IN_FLIGHT", choose.choice([0, 3000, 1 << 30]))
    monkeypatch.setattr(twins, "LARGEST_CHUNK", choose.choice([1 << 12, 1 << 14, 1 << 30]))
    least = choose.choice([0, 0, 0, 50])
    monkeypatch.setattr(twins, "LEAST_OFFLOADED", least)
    options = random_options(choose)
    shapes = [tuple(choose.choice([1, 2, 3, 17, 40]) for _ in range(choose.randrange(4))) for _ in range(7)] + [(900,)]
    run = Run(DEVICE, shapes=shapes, **options)
    peer = Run("cpu", shapes=shapes, least_on_cpu=least, **options)
    for t in range(STEPS):
        event = choose.choice(["nothing", "nothing", "others write", "load", "drop"])
        for one in (run, peer):
            if not (event == "drop" and one.optimizer.options.needs_one_pass):  # which may have stepped by then
                after_step(one, event)
            one.train(range(t, t + 1))
    assert_same_bits(run, peer)
