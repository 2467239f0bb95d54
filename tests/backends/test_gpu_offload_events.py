"""Offload where a step is not like the others: what comes between steps, what fails and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swd_fused import FusedAdamS
from swd_fused.step import overlap
from swd_fused.step.overlap import OverlappedStep
from swd_fused.tensors import twins
from tests.backends.offloaded_run import Run, assert_same_bits
from tests.device import DEVICE, needs_gpu

pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def _many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SLOT_BYTES", 1 << 12)
    monkeypatch.setattr(twins, "LEAST_OFFLOADED", 0)


# --- What fails


def test_errors_of_the_worker_reach_the_caller_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been stepped before is whole, what has not is as it was, and training goes on."""
    monkeypatch.setattr(overlap, "SLOTS", 1)
    run = Run(DEVICE, shapes=[(1024,)] * 5, schedule="lagged")
    run.train(range(3))
    before = [param.detach().cpu() for param in run.params]
    counts = [float(run.optimizer.state[param]["step"]) for param in run.params]
    update, calls = OverlappedStep._update, []

    def failing(self: OverlappedStep, grads: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("of the host")
        return update(self, grads)

    with monkeypatch.context() as patch:
        patch.setattr(OverlappedStep, "_update", failing)
        run.backward(run.grads(3))
        with pytest.raises(MemoryError, match="of the host"):
            run.optimizer.step()
    has_moved = [not torch.equal(param.cpu(), old) for param, old in zip(run.params, before, strict=True)]
    has_counted = [
        float(run.optimizer.state[param]["step"]) > count for param, count in zip(run.params, counts, strict=True)
    ]
    assert has_moved == has_counted
    assert any(has_moved)
    assert not all(has_moved)
    run.train(range(4, 6))
    now = [float(run.optimizer.state[param]["step"]) for param in run.params]
    assert all(after >= count + 1 for after, count in zip(now, counts, strict=True))


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_second_gradient_is_refused(schedule: Any) -> None:
    run = Run(DEVICE, schedule=schedule)
    run.train(range(2))
    run.backward(run.grads(2))
    with pytest.raises(RuntimeError, match=r"got a second gradient before optimizer\.step\(\)"):
        run.backward(run.grads(3))


def test_zero_grad_drops_what_is_on_the_host() -> None:
    run, peer = Run(DEVICE), Run("cpu")
    run.train(range(2))
    run.backward(run.grads(7))
    run.optimizer.zero_grad()
    run.optimizer.step()  # of nothing
    run.train(range(2, 4))
    peer.train(range(4))
    assert_same_bits(run, peer)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_gradients_that_no_hook_has_seen_are_stepped(schedule: Any) -> None:
    """Set by hand, and of another dtype than the parameter's."""
    run, peer = (Run(device, torch.bfloat16, schedule=schedule) for device in (DEVICE, "cpu"))
    for t in range(4):
        for one in (run, peer):
            for param, grad in zip(one.params, one.grads(t), strict=True):
                if grad is not None:
                    param.grad_dtype = torch.float32  # type: ignore[attr-defined]
                param.grad = None if grad is None else grad.float()
            one.optimizer.step()
    assert_same_bits(run, peer)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_closure_runs_the_backward_pass(schedule: Any) -> None:
    run, peer = (Run(device, schedule=schedule) for device in (DEVICE, "cpu"))

    def closure(one: Run, t: int) -> float:
        one.optimizer.zero_grad()
        one.backward(one.grads(t))
        return 3.0

    for t in range(4):
        for one in (run, peer):
            assert one.optimizer.step(lambda one=one, t=t: closure(one, t)) == 3.0  # type: ignore[misc]
    peer.optimizer.zero_grad()
    assert_same_bits(run, peer)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_a_learning_rate_on_the_gpu_is_obeyed(schedule: Any) -> None:
    run, peer = (Run(device, schedule=schedule) for device in (DEVICE, "cpu"))
    for one in (run, peer):
        for group in one.optimizer.param_groups:
            group["lr"] = torch.tensor(1e-2, dtype=torch.float64, device=one.device)
    for t in range(4):
        for one in (run, peer):
            for group in one.optimizer.param_groups:
                group["lr"].fill_(1e-2 / (1 + t))
            one.backward(one.grads(t))
            one.step()
    assert_same_bits(run, peer)


def test_frozen_parameters_take_no_part_until_they_are_trained() -> None:
    run, peer = Run(DEVICE), Run("cpu")
    for one in (run, peer):
        one.params[0].requires_grad_(False)
        for t in range(2):
            one.backward([None, *one.grads(t)[1:]])
            one.step()
        assert one.optimizer.state.get(one.params[0]) is None
        one.params[0].requires_grad_(True)
        one.step()  # from which on it is watched
        one.train(range(2, 4))
    assert_same_bits(run, peer)


def test_groups_that_are_added_are_offloaded() -> None:
    run, peer = Run(DEVICE, schedule="lagged"), Run("cpu", schedule="lagged")
    for one in (run, peer):
        one.train(range(2))
        new = nn.Parameter(torch.ones(50, device=one.device))
        one.params.append(new)
        one.shapes = [*one.shapes, (50,)]
        one.optimizer.add_param_group({"params": [new], "lr": 1e-2})
        one.train(range(2, 5))
    assert_same_bits(run, peer)


def test_a_sum_of_squares_is_taken() -> None:
    run, peer = Run(DEVICE), Run("cpu")
    for _ in range(3):
        for one in (run, peer):
            grads = one.grads(5)
            one.backward(grads)
            total = sum(grad.double().square().sum() for grad in grads if grad is not None)
            one.optimizer.step(grad_sumsq=total)
            one.optimizer.zero_grad()
    assert_same_bits(run, peer)


def test_options_are_not_changed_within_a_lagged_step() -> None:
    run = Run(DEVICE, schedule="lagged")
    run.train(range(2))
    run.backward(run.grads(2))
    with pytest.raises(RuntimeError, match="schedule='exact' after a backward pass that has begun to step"):
        run.optimizer.schedule = "exact"
    with pytest.raises(RuntimeError, match="another group after a backward pass that has begun to step"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    run.optimizer.step()
    run.optimizer.schedule = "exact"
    run.train(range(3, 5))


def test_state_that_is_loaded_within_a_lagged_step_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins that were stepped and not copied back are those of the parameters again."""
    monkeypatch.setattr(overlap, "SLOTS", 1)
    run, peer = (Run(device, shapes=[(1024,)] * 5, schedule="lagged") for device in (DEVICE, "cpu"))
    run.train(range(3))
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.backward(run.grads(3))
    for one in (run, peer):
        one.optimizer.load_state_dict(copy.deepcopy(saved))
    with torch.no_grad():
        for param, other in zip(peer.params, run.params, strict=True):
            param.copy_(other)
    run.train(range(4, 6))
    peer.train(range(4, 6))
    assert_same_bits(run, peer)


def test_a_state_dict_within_a_lagged_step_is_not_being_written_to() -> None:
    run = Run(DEVICE, shapes=[(1024,)] * 5, schedule="lagged")
    run.train(range(2))
    run.backward(run.grads(2))
    run.optimizer.state_dict()
    step = run.optimizer._taker._step  # type: ignore[union-attr]
    assert isinstance(step, OverlappedStep)
    assert step._jobs
    assert all(job.done() for job in step._jobs)


# --- What is refused


def test_gradient_release_is_refused() -> None:
    with pytest.raises(ValueError, match="release_gradients does not go with offload=True"):
        Run(DEVICE, schedule="lagged").optimizer.release_gradients()


def scaled_backward(run: Run, scaler: torch.amp.GradScaler, t: int, infinite: bool = False) -> None:
    scale = scaler.scale(torch.ones((), device=run.device))
    grads = [None if grad is None else grad * scale for grad in run.grads(t)]
    if infinite:
        assert grads[0] is not None
        grads[0][3, 5] = torch.inf
    run.backward(grads)


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.05}, {"decay": "decoupled"}, {"skip_nonfinite": True, "amsgrad": True}]
)
def test_a_grad_scaler_unscales_and_skips(options: dict[str, Any]) -> None:
    """An infinity that has left the GPU lowers the scale, and its step changes nothing."""
    run, peer = (Run(device, **options) for device in (DEVICE, "cpu"))
    scalers = [torch.amp.GradScaler(one.device.split(":")[0], init_scale=1024.0) for one in (run, peer)]
    for t in range(6):
        for one, scaler in zip((run, peer), scalers, strict=True):
            before = [param.detach().clone() for param in one.params]
            scaled_backward(one, scaler, t, infinite=t in (0, 3))
            scaler.step(one.optimizer)
            scaler.update()
            one.optimizer.zero_grad()
            has_moved = not all(map(torch.equal, one.params, before))
            assert has_moved == (t not in (0, 3))
        assert scalers[0].get_scale() == scalers[1].get_scale() == 1024.0 / (2 if t < 3 else 4)
        assert float(run.optimizer.skipped_steps) == float(peer.optimizer.skipped_steps)
    for param, other in zip(run.params, peer.params, strict=True):
        assert torch.allclose(param.cpu(), other, rtol=1e-5, atol=1e-7)
        assert float(run.optimizer.state[param]["step"]) == float(peer.optimizer.state[other]["step"])


@pytest.mark.parametrize(
    ("options", "overlaps"),
    [
        ({"schedule": "lagged"}, True),
        ({"decay": "decoupled"}, True),
        ({"decay": "l2"}, True),
        ({}, False),
        ({"decay": "decoupled", "max_grad_norm": 1.0}, False),
        ({"decay": "decoupled", "skip_nonfinite": True}, False),
    ],
)
def test_steps_that_need_nothing_of_the_whole_model_overlap_the_backward_pass(
    options: dict[str, Any], overlaps: bool
) -> None:
    run = Run(DEVICE, **options)
    run.train(range(1))
    run.backward(run.grads(1))
    assert isinstance(run.optimizer._taker._step, OverlappedStep) == overlaps  # type: ignore[union-attr]


def test_a_grad_scaler_is_refused_before_anything_is_written() -> None:
    """Where parameters are stepped in the backward pass, and after unscale_, which finds no gradients."""
    for steps, is_unscaled, why in ((0, True, "after scaler.unscale_"), (3, False, "steps parameters already")):
        run = Run(DEVICE, schedule="lagged" if steps else "exact")
        run.train(range(steps))
        resumed = run.new_optimizer()  # which has taken steps, and not yet this one
        resumed.load_state_dict(run.optimizer.state_dict())
        run.optimizer = resumed
        before = [param.detach().cpu() for param in run.params]
        scaler = torch.amp.GradScaler("cuda")
        scaled_backward(run, scaler, 5)
        if is_unscaled:
            scaler.unscale_(run.optimizer)
        with pytest.raises(RuntimeError, match=why):
            scaler.step(run.optimizer)
        assert all(torch.equal(param.cpu(), old) for param, old in zip(run.params, before, strict=True))


def test_captures_are_refused() -> None:
    param = nn.Parameter(torch.ones(64, device=DEVICE))
    optimizer = FusedAdamS([param], offload=True)
    param.grad = grad = torch.ones(64, device=DEVICE)
    optimizer.step()
    refused = pytest.raises(RuntimeError, match="in the capture of a CUDA graph, with offload=True")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        param.grad = grad.mul_(2)
        optimizer.step()


def test_ddp_is_refused() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(3, 3).to(DEVICE)
        optimizer = FusedAdamS(model.parameters(), offload=True)
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(RuntimeError, match="got offload=True for parameters of DistributedDataParallel"):
            wrapped(torch.ones(2, 3, device=DEVICE)).sum().backward()
        optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def test_several_ranks_are_refused() -> None:
    run = Run(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swd_fused.distributed.wrappers.is_distributed", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: 2)
        with pytest.raises(RuntimeError, match="got offload=True for parameters of 2 ranks"):
            run.backward(run.grads(0))


def test_sparse_gradients_are_refused_by_the_step() -> None:
    param = nn.Parameter(torch.ones(10, 4, device=DEVICE))
    optimizer = FusedAdamS([param], offload=True)
    param.grad = torch.ones(10, 4, device=DEVICE).to_sparse()
    with pytest.raises(RuntimeError, match="wanted a dense one"):
        optimizer.step()
