"""Offload of models with small tensors, which stay on the GPU: one step, and one mean, of two devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.step import overlap
from swd_fused.tensors import twins
from tests.backends.offloaded_run import Run, assert_same_bits
from tests.device import DEVICE, needs_gpu

pytestmark = needs_gpu

LEAST = 100
SHAPES = [(7,), (40, 30), (5, 5), (300,), (), (20, 20), (90,)]
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lagged": {"schedule": "lagged"},
    "clipping": {"max_grad_norm": 0.05, "amsgrad": True},
    "lagged masters": {"dtype": torch.bfloat16, "master_weights": True, "schedule": "lagged"},
    "lagged and stochastic": {"dtype": torch.bfloat16, "stochastic_rounding": True, "schedule": "lagged"},
}


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "LEAST_OFFLOADED", LEAST)
    monkeypatch.setattr(overlap, "SLOT_BYTES", 1 << 12)


def runs(**options: Any) -> tuple[Run, Run]:
    """An offloaded model; and one whose tensors, and their state, are where the other one's state is."""
    return Run(DEVICE, shapes=SHAPES, **options), Run("cpu", shapes=SHAPES, least_on_cpu=LEAST, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_an_ordinary_optimizer_of_both_devices(name: str) -> None:
    run, peer = runs(**OPTIONS[name])
    logged, expected = run.train(range(5)), peer.train(range(5))
    assert [value.is_cuda for value in (run.optimizer.state[param]["exp_avg"] for param in run.params)] == [
        param.numel() < LEAST for param in run.params
    ]
    assert_same_bits(run, peer)
    assert logged == [pytest.approx(row, rel=1e-12) for row in expected]
    assert all(param.grad is None for param in run.params)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_checkpoints_move_both_ways(schedule: Any) -> None:
    """Between this, an optimizer that offloads all, and one that offloads nothing: state is where each wants it."""
    run, peer = runs(schedule=schedule)
    run.train(range(3))
    peer.train(range(6))
    saved = run.optimizer.state_dict()
    for offload, least, is_on_gpu in ((True, 0, False), (False, 0, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(twins, "LEAST_OFFLOADED", least)
            other = FusedAdamS(run.groups(), schedule=schedule, offload=offload)
            other.load_state_dict(copy.deepcopy(saved))
        assert all(state["exp_avg"].is_cuda == is_on_gpu for state in other.state.values())
        saved = other.state_dict()
    run.optimizer = run.new_optimizer()
    run.optimizer.load_state_dict(saved)
    run.train(range(3, 6))
    assert_same_bits(run, peer)


def test_an_infinity_anywhere_skips_both_devices() -> None:
    run, _ = runs()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    run.train(range(2))
    for place, index in enumerate((0, 1)):  # on the GPU, on the host
        before = [param.detach().clone() for param in run.params]
        grads = [None if grad is None else grad * scaler.scale(torch.ones((), device=DEVICE)) for grad in run.grads(2)]
        grads[index].view(-1)[0] = torch.inf  # type: ignore[union-attr]
        run.backward(grads)
        scaler.step(run.optimizer)
        scaler.update()
        assert all(map(torch.equal, run.params, before))
        assert scaler.get_scale() == 1024.0 / 2 ** (place + 1)
