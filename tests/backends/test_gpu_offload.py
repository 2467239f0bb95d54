"""Offload: the steps of plain CPU tensors bit for bit, with parameters on a GPU and copies as late as they may come."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swd_fused import FusedAdamS
from swd_fused.backends.cpu_backend import CpuBackend
from swd_fused.step import overlap
from swd_fused.tensors import twins
from tests.backends.offloaded_run import Run, assert_same_bits
from tests.device import DEVICE, needs_gpu

pytestmark = needs_gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lagged": {"schedule": "lagged"},
    "clipping": {"max_grad_norm": 0.05},
    "skipping": {"skip_nonfinite": True},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "lagged amsgrad": {"amsgrad": True, "schedule": "lagged", "corrected_decay": True, "cautious_decay": True},
    "decoupled": {"decay": "decoupled", "corrected_decay": True},
    "decoupled 8 bits": {
        "decay": "decoupled",
        "dtype": torch.bfloat16,
        "stochastic_rounding": True,
        "state_dtype": "8bit",
    },
    "l2": {"decay": "l2", "amsgrad": True},
    "calibrated": {"adamw_weight_decay": 0.1, "calibration_steps": 3},
    "lagged and calibrated": {"adamw_weight_decay": 0.1, "calibration_steps": 3, "schedule": "lagged"},
    "float64": {"dtype": torch.float64},
    "masters": {"dtype": torch.bfloat16, "master_weights": True},
    "lagged masters": {"dtype": torch.bfloat16, "master_weights": True, "schedule": "lagged"},
    "stochastic": {"dtype": torch.bfloat16, "stochastic_rounding": True, "state_dtype": torch.bfloat16},
    "8 bits": {"dtype": torch.bfloat16, "stochastic_rounding": True, "state_dtype": "8bit"},
    "lagged 8 bits": {
        "dtype": torch.bfloat16,
        "stochastic_rounding": True,
        "state_dtype": "8bit",
        "schedule": "lagged",
    },
}


@pytest.fixture(autouse=True)
def _many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that hold a few gradients, so that a small model fills several."""
    monkeypatch.setattr(overlap, "SLOT_BYTES", 1 << 12)
    monkeypatch.setattr(twins, "LEAST_OFFLOADED", 0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("_codes_of_small_tensors")
def test_steps_are_those_of_cpu_tensors_bit_for_bit(name: str) -> None:
    run, peer = (Run(device, **OPTIONS[name]) for device in (DEVICE, "cpu"))
    logged, expected = run.train(range(6)), peer.train(range(6))
    assert_same_bits(run, peer)
    assert logged == [pytest.approx(row, rel=1e-12) for row in expected]


@pytest.mark.parametrize("name", ["exact", "clipping", "amsgrad"])
def test_sums_of_a_gpu_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its kernels take them, in float32 within rows; and the host reads no gradient for them."""
    run, peer = (Run(device, **OPTIONS[name]) for device in (DEVICE, "cpu"))
    for t in range(4):
        peer.backward(peer.grads(t))
        peer.optimizer.step()
        peer.optimizer.zero_grad()
        expected = float(peer.optimizer.exp_avg_sq_mean), float(peer.optimizer.grad_norm)
        with monkeypatch.context() as patch:
            patch.setattr(CpuBackend, "pass1", None)
            run.backward(run.grads(t))
            run.optimizer.step()
        now = float(run.optimizer.exp_avg_sq_mean), float(run.optimizer.grad_norm)
        assert now == pytest.approx(expected, rel=1e-7)


def test_the_cpu_steps_what_is_offloaded() -> None:
    run = Run(DEVICE)
    assert "backend: cpu" in repr(run.optimizer)
    assert "offload: True" in repr(run.optimizer)


# --- Checkpoints


@pytest.mark.parametrize("name", ["exact", "lagged", "lagged masters", "lagged 8 bits"])
@pytest.mark.usefixtures("_codes_of_small_tensors")
def test_checkpoints_move_both_ways(name: str) -> None:
    """From an offloaded optimizer to one of CPU tensors and back, as if nothing had happened."""
    peer = Run("cpu", **OPTIONS[name])
    peer.train(range(6))
    runs = [Run(device, **OPTIONS[name]) for device in (DEVICE, "cpu", DEVICE)]
    for part, run in enumerate(runs):
        if part:
            before = runs[part - 1]
            with torch.no_grad():
                for param, other in zip(run.params, before.params, strict=True):
                    param.copy_(other)
            run.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
        run.train(range(2 * part, 2 * part + 2))
    assert_same_bits(runs[-1], peer)


def test_an_ordinary_optimizer_takes_the_state_to_the_gpu_and_back() -> None:
    run = Run(DEVICE)
    run.train(range(3))
    ordinary = FusedAdamS(run.groups())
    ordinary.load_state_dict(run.optimizer.state_dict())
    assert all(value.is_cuda for state in ordinary.state.values() for value in state.values())
    resumed = run.new_optimizer()
    resumed.load_state_dict(ordinary.state_dict())
    for param, state in run.optimizer.state.items():
        assert all(resumed.state[param][key].is_cpu for key in state)
        assert all(torch.equal(resumed.state[param][key], state[key]) for key in state)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_copies_go_on(schedule: str) -> None:
    run, peer = (Run(device, schedule=schedule) for device in (DEVICE, "cpu"))
    run.train(range(3))
    run.params, run.optimizer = copy.deepcopy((run.params, run.optimizer))
    run.train(range(3, 6))
    peer.train(range(6))
    assert_same_bits(run, peer)


# --- Parameters that others write to


def halved(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)


def replaced(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data = param.data * 0.5


@pytest.mark.parametrize("write", [halved, replaced])
@pytest.mark.parametrize("name", ["exact", "lagged", "masters", "lagged masters", "lagged 8 bits"])
@pytest.mark.usefixtures("_codes_of_small_tensors")
def test_twins_follow_what_others_write(name: str, write: Callable[[list[nn.Parameter]], None]) -> None:
    run, peer = (Run(device, **OPTIONS[name]) for device in (DEVICE, "cpu"))
    for one in (run, peer):
        one.train(range(3))
        write(one.params)
        one.train(range(3, 6))
    assert_same_bits(run, peer)


def test_a_write_between_a_lagged_gradient_and_its_step_is_refused() -> None:
    run = Run(DEVICE, schedule="lagged")
    run.train(range(2))
    run.backward(run.grads(2))
    halved(run.params)
    with pytest.raises(RuntimeError, match=r"was written to between its gradient and optimizer.step\(\)"):
        run.optimizer.step()


# --- Whole models


class Net(nn.Module):
    """`again` is used twice, so that one of its uses is still to come when another has been gone through."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.leave = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.again(torch.tanh(self.again(self.enter(x)))))  # type: ignore[no-any-return]


def new_net(device: str) -> Net:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Net().to(device)


def loss_of(net: Net, t: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(t)
    device = net.enter.weight.device
    x, y = (torch.randn(8, width, generator=generator, device="cpu").to(device) for width in (6, 3))
    return (net(x) - y).square().mean()


@pytest.mark.parametrize("is_on_side_stream", [False, True])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_backward_pass_is_not_disturbed(schedule: Any, is_on_side_stream: bool) -> None:
    """Of a step that overlaps it, and writes to parameters that it has read, as it may come to do late."""
    net, peer = new_net(DEVICE), new_net("cpu")
    optimizer = FusedAdamS(net.parameters(), lr=1e-2, schedule=schedule, offload=True)
    ordinary = FusedAdamS(peer.parameters(), lr=1e-2, schedule=schedule)
    side = torch.cuda.Stream() if is_on_side_stream else None
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for t in range(5):
            loss_of(net, t).backward()
            optimizer.step()
            ordinary.zero_grad()
            loss_of(peer, t).backward()
            ordinary.step()
    torch.cuda.synchronize()
    for param, other in zip(net.parameters(), peer.parameters(), strict=True):
        assert torch.allclose(param.cpu(), other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_micro_batches_accumulate(schedule: Any) -> None:
    net, peer = new_net(DEVICE), new_net("cpu")
    optimizer = FusedAdamS(net.parameters(), lr=1e-2, schedule=schedule, offload=True)
    ordinary = FusedAdamS(peer.parameters(), lr=1e-2, schedule=schedule)
    for t in range(4):
        with optimizer.accumulate_gradients():
            loss_of(net, 2 * t).backward()
            assert net.enter.weight.grad is not None
        loss_of(net, 2 * t + 1).backward()
        assert net.enter.weight.grad is None
        optimizer.step()
        for micro_batch in (2 * t, 2 * t + 1):
            loss_of(peer, micro_batch).backward()
        ordinary.step()
        ordinary.zero_grad()
    for param, other in zip(net.parameters(), peer.parameters(), strict=True):
        assert torch.allclose(param.cpu(), other, rtol=0, atol=1e-6)
