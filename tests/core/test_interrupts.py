"""Ctrl-C at any moment of a step: all parameters have taken it, or none."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.device import DEVICE
from tests.runs import random_grads, random_params, run

pytestmark = pytest.mark.backends(interpreted=False)

SHAPES = [(30,), (4, 5), (7,)]


@pytest.fixture(autouse=True)
def _interrupts_are_raised() -> Iterator[None]:
    """Also where the shell has started the tests in the background, which then ignore SIGINT."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


class InterruptedAt:
    """Sends SIGINT when the step makes its `number`-th call of Python, in whatever function that is.

    Not of generators: one that is closed in passing swallows what is raised in it. Nor of the virtual GPU, which no
    signal reaches where there is a real one.
    """

    def __init__(self, number: int) -> None:
        self.left = number

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR or is_of_the_virtual_gpu(frame):
            return
        self.left -= 1
        if self.left == 0:
            self.left = -1  # once, also if a generator is next
            signal.raise_signal(signal.SIGINT)

    def step(self, optimizer: FusedAdamS) -> bool:
        """Returns whether the interrupt has come out of the step."""
        sys.settrace(self.trace)
        try:
            optimizer.step()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def is_of_the_virtual_gpu(frame: FrameType | None) -> bool:
    while frame is not None and "virtual_gpu" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def new_run(backend: str, groups: int, **options: Any) -> tuple[list[torch.nn.Parameter], FusedAdamS]:
    """The groups differ in what makes buckets of their own."""
    torch.manual_seed(0)
    params = random_params(SHAPES)
    amsgrad = [False, True]
    optimizer = FusedAdamS(
        [{"params": params[:1]}, {"params": params[1:], "amsgrad": amsgrad[groups - 1]}], backend=backend, **options
    )
    run(params, random_grads(SHAPES, 2), optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    return params, optimizer


def told(params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> list[torch.Tensor]:
    state = [value.clone() for param in params for value in optimizer.state[param].values()]
    return [param.detach().clone() for param in params] + state


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"max_grad_norm": 0.5}], ids=str)
def test_all_parameters_have_taken_the_step_or_none(backend: str, options: dict[str, Any], groups: int) -> None:
    if not hasattr(signal, "raise_signal") or threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread gets signals")
    params, optimizer = new_run(backend, groups, **options)
    before = told(params, optimizer)
    optimizer.step()
    after = told(params, optimizer)
    assert not all(map(torch.equal, before, after))
    gc.disable()  # finalizers would be calls too
    seen = set()
    try:
        for number in range(1, 10_000, 7 if DEVICE == "cpu" else 61):  # some of the calls, all of them took minutes
            params, optimizer = new_run(backend, groups, **options)
            interrupt = InterruptedAt(number)
            was_interrupted = interrupt.step(optimizer)
            now = told(params, optimizer)
            is_before, is_after = (all(map(torch.equal, now, whole)) for whole in (before, after))
            assert is_before or is_after, f"some have stepped and some have not, at call {number}"
            seen.add((was_interrupted, is_after))
            if interrupt.left > 0:
                break
    finally:
        gc.enable()
    # It came before the writes, after them, and not at all.
    assert seen >= {(True, False), (False, True)}


def test_handlers_of_the_user_are_called_once_and_stay(backend: str) -> None:
    """In every step, if an interrupt comes in every step."""
    calls: list[int] = []
    mine = lambda number, frame: calls.append(number)  # noqa: E731
    usual = signal.signal(signal.SIGINT, mine)
    try:
        for _ in range(2):
            _, optimizer = new_run(backend, groups=2)
            before = len(calls)
            for number in range(1, 60, 7):
                assert not InterruptedAt(number).step(optimizer)
                assert signal.getsignal(signal.SIGINT) is mine
            assert len(calls) == before + 9
    finally:
        signal.signal(signal.SIGINT, usual)
