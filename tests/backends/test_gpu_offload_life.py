"""Offload from step to step: where memory is, which thread steps, what fails and what is refused."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
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
from tests.device import DEVICE

pytestmark = pytest.mark.skipif(
    "SWD_FUSED_TEST_DEVICE" not in os.environ or DEVICE == "cpu",
    reason="needs a CUDA or ROCm GPU, and is run there by `make test-gpu`",
)

MEGABYTE = 1 << 20
WORKER = "swd_fused-offload"


@pytest.fixture(autouse=True)
def _many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SLOT_BYTES", 1 << 12)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(WORKER)]


# --- Memory


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_the_gpu_holds_parameters_and_gradients_in_flight(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "MOST_BYTES_IN_FLIGHT", 2 * MEGABYTE)
    monkeypatch.setattr(overlap, "SLOT_BYTES", 2 * MEGABYTE)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run = Run(DEVICE, shapes=[(256, 1024)] * 16, schedule=schedule)
    optimizer, params = run.optimizer, run.params
    for _ in range(3):
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before <= 16 * MEGABYTE + 4096
        torch.cuda.reset_peak_memory_stats()
        sum(param.square().sum() for param in params).backward()  # type: ignore[union-attr]
        assert all(param.grad is None for param in params)
        optimizer.step()
    # With ordinary steps: gradients of 16 MB, and moments of 32 MB. Active is what copies still read, too.
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before < (16 + 9) * MEGABYTE
    assert all(value.is_cpu for state in optimizer.state.values() for value in state.values())


CHOICES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, master weights": {"dtype": torch.bfloat16, "master_weights": True},
    "bfloat16, stochastic rounding, 8bit": {
        "dtype": torch.bfloat16,
        "stochastic_rounding": True,
        "state_dtype": "8bit",
    },
}


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
@pytest.mark.parametrize("choice", CHOICES)
def test_bytes_are_those_of_the_page(choice: str, schedule: Any) -> None:
    """By counting tensors: what the GPU's allocator has given out, and on the host state, twins and kept gradients."""
    page = (Path(__file__).parents[2] / "docs" / "offload.md").read_text()
    gc.collect()
    torch.cuda.synchronize()
    before, numel = torch.cuda.memory_allocated(), 1 << 20
    run = Run(DEVICE, shapes=[(1024, 1024)], schedule=schedule, **CHOICES[choice])
    for _ in range(3):
        run.params[0].float().square().sum().backward()
        run.optimizer.step()
    torch.cuda.synchronize()
    on_gpu = (torch.cuda.memory_allocated() - before) / numel
    taker: Any = run.optimizer._taker
    waiting = [*taker._twins.stepped_for(run.params), *taker._kept_memory.values()]
    tensors = [*run.optimizer.state[run.params[0]].values(), *waiting]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    on_host = sum(storages.values()) / numel
    (row,) = re.findall(rf"^\| {choice}, {schedule} \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert (round(on_gpu, 2), round(on_host, 2)) == tuple(map(float, row))


def test_twins_have_memory_of_their_own() -> None:
    tensors = [torch.empty(numel, device="meta") for numel in (70_000, 3, 300_000, 0, 11_000, 270_000, 40_000, 1)]
    made = twins.pinned_like(tensors)
    for index, tensor in enumerate(made):
        assert tensor.shape == tensors[index].shape
        tensor.fill_(index)
    assert all(bool((tensor == index).all()) and tensor.is_pinned() for index, tensor in enumerate(made) if len(tensor))


def test_chunks_are_hardly_larger_than_what_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the shapes of a Llama of 7B. torch rounds each allocation of pinned memory up to a power of two."""
    lengths = []

    class Planned(twins.Chunk):
        def __init__(self, length: int) -> None:
            self._memory, self._used = torch.empty(length, dtype=torch.uint8, device="meta"), 0
            lengths.append(length)

    monkeypatch.setattr(twins, "Chunk", Planned)
    layer = [(4096, 4096)] * 4 + [(11008, 4096)] * 3 + [(4096,)] * 2
    shapes = [(32000, 4096), *layer * 32, (4096,), (32000, 4096)]
    twins.pinned_like([torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes])
    assert all(length == twins.power_of_two_from(length) for length in lengths)
    assert sum(lengths) < 1.02 * 2 * sum(torch.Size(shape).numel() for shape in shapes)


# --- Streams and threads that come in another order


def test_gradients_are_nobody_elses_until_they_are_copied() -> None:
    """Where the stream that computes runs far ahead of the one that copies."""
    run, peer = (Run(device, shapes=[(1000,)] * 6) for device in (DEVICE, "cpu"))
    for t in range(3):
        for one in (run, peer):
            one.backward(one.grads(t))
            torch.cuda.current_stream().synchronize()
            one.step()
    assert_same_bits(run, peer)


def test_parameters_are_read_before_they_are_written() -> None:
    """By what was queued before the step, even if the copies back are the first to run."""
    run = Run(DEVICE)
    run.train(range(3))
    before = [param.detach().cpu() for param in run.params]
    run.backward(run.grads(3))
    read = [param.detach().clone() for param in run.params]
    run.optimizer.step()
    for event in run.optimizer._taker._twins.copies._last_up:  # type: ignore[union-attr]
        event.synchronize()
    assert all(torch.equal(value.cpu(), old) for value, old in zip(read, before, strict=True))


def test_twins_are_read_before_they_are_written() -> None:
    """By the copies of the step before, whose stream the gradients of this one know nothing of."""
    run, peer = Run(DEVICE), Run("cpu")
    run.train(range(2))
    peer.train(range(3))
    grads = run.grads(3)
    torch.cuda.synchronize()
    run.train(range(2, 3))
    read = [param.detach().clone() for param in run.params]
    with torch.cuda.stream(torch.cuda.Stream()):
        for param, grad in zip(run.params, grads, strict=True):
            param.grad = grad
        run.optimizer.step()
    assert all(torch.equal(value.cpu(), param) for value, param in zip(read, peer.params, strict=True))


def test_a_slot_is_not_filled_while_it_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SLOTS", 1)
    monkeypatch.setattr(twins, "MOST_BYTES_IN_FLIGHT", 0)
    update = OverlappedStep._update

    def slow(self: OverlappedStep, grads: Any) -> Any:
        time.sleep(0.05)
        return update(self, grads)

    monkeypatch.setattr(OverlappedStep, "_update", slow)
    run, peer = (Run(device, shapes=[(1024,)] * 5, schedule="lagged") for device in (DEVICE, "cpu"))
    run.train(range(3))
    peer.train(range(3))
    assert_same_bits(run, peer)
    assert run.optimizer._taker._slots._made == 1  # type: ignore[union-attr]


def test_parameters_that_are_gone_are_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step that was begun and never ended."""
    monkeypatch.setattr(overlap, "SLOTS", 1)
    run = Run(DEVICE, shapes=[(5000,)] * 5, schedule="lagged")
    run.train(range(3))
    run.backward(run.grads(3))
    run.optimizer.state_dict()  # waits for the thread, not for the GPU
    is_gone = weakref.ref(run.params[0])
    del run
    gc.collect()
    assert is_gone() is None
    theirs = [torch.full((5000,), 7.0, device=DEVICE) for _ in range(64)]
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert all(bool((tensor == 7.0).all()) for tensor in theirs)


# --- Which thread steps, and when


def test_a_lagged_step_is_taken_while_gradients_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker, once its first slot is full; its results are on their way back before the backward pass ends."""
    monkeypatch.setattr(overlap, "SLOTS", 1)  # so that a slot is stepped before the next one is filled
    seen: list[str] = []
    update = OverlappedStep._update

    def noted(self: OverlappedStep, grads: Any) -> Any:
        seen.append(threading.current_thread().name)
        return update(self, grads)

    monkeypatch.setattr(OverlappedStep, "_update", noted)
    run = Run(DEVICE, shapes=[(1024,)] * 5, schedule="lagged")
    run.train(range(1))
    assert seen == []  # a first step is exact, and waits for all gradients
    start = [param._version for param in run.params]
    run.backward(run.grads(1))
    assert all(name.startswith(WORKER) for name in seen)
    assert len(seen) >= 2
    back = [param._version > version for param, version in zip(run.params, start, strict=True)]
    assert any(back)
    assert not all(back)
    run.optimizer.step()


def test_an_exact_step_has_no_thread() -> None:
    before = set(workers())
    run = Run(DEVICE)
    run.train(range(2))
    assert set(workers()) <= before


def test_deleting_the_optimizer_ends_the_thread() -> None:
    gc.collect()
    before = set(workers())
    run = Run(DEVICE, schedule="lagged")
    run.train(range(3))
    (worker,) = set(workers()) - before
    optimizer, params = weakref.ref(run.optimizer), run.params
    del run.optimizer
    gc.collect()
    assert optimizer() is None
    worker.join(timeout=20)
    assert not worker.is_alive()
    torch.stack([param.sum() for param in params]).sum().backward()  # without the hooks' owner
    assert all(param.grad is not None for param in params)


FORKED = """
import os, sys, torch
from swd_fused import FusedAdamS
param = torch.nn.Parameter(torch.ones(1000, device="cuda"))
optimizer = FusedAdamS([param], schedule="lagged", offload=True)
for _ in range(3):
    param.square().sum().backward()
    optimizer.step()
param.square().sum().backward()
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("forked")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_and_exit_do_not_hang() -> None:
    """With a step that is begun and never ended."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "forked\n"), done.stderr


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


def test_loss_scaling_is_refused_before_anything_is_written() -> None:
    run = Run(DEVICE)
    before = [param.detach().cpu() for param in run.params]
    scaler = torch.amp.GradScaler("cuda")
    loss = scaler.scale(torch.ones((), device=DEVICE))
    run.backward([grad * loss for grad in run.grads(5) if grad is not None])
    with pytest.raises(RuntimeError, match="was called by a GradScaler with offload=True"):
        scaler.step(run.optimizer)
    assert all(torch.equal(param.cpu(), old) for param, old in zip(run.params, before, strict=True))


def test_captures_are_refused() -> None:
    param = nn.Parameter(torch.ones(64, device=DEVICE))
    optimizer = FusedAdamS([param], offload=True)
    param.grad = torch.ones(64, device=DEVICE)
    optimizer.step()
    refused = pytest.raises(RuntimeError, match="in the capture of a CUDA graph, with offload=True")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        param.grad.mul_(2)
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
