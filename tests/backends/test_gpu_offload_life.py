"""Offload from step to step: where memory is, and which thread steps when."""

from __future__ import annotations

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

from swd_fused.step import overlap
from swd_fused.step.overlap import OverlappedStep
from swd_fused.tensors import twins
from tests.backends.offloaded_run import Run, assert_same_bits
from tests.device import DEVICE, needs_gpu

pytestmark = needs_gpu

MEGABYTE = 1 << 20
WORKER = "swd_fused-offload"


@pytest.fixture(autouse=True)
def _many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SLOT_BYTES", 1 << 12)
    monkeypatch.setattr(twins, "LEAST_OFFLOADED", 0)


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


def test_a_parameter_is_not_given_out_again_before_its_twin_is_copied_back() -> None:
    """Stepped on a side stream, and freed: its memory is the main stream's, which waits for neither."""
    run = Run(DEVICE, shapes=[(40, 30)])
    run.train(range(2))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        run.backward(run.grads(2))
        run.optimizer.step()
    del run
    gc.collect()
    theirs = [torch.full((40 * 30,), 7.0) for _ in range(64)]
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert all(bool((tensor == 7.0).all()) for tensor in theirs)


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
