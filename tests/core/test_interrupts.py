"""Ctrl-C at any moment of a step: all parameters have taken it and it is recorded, or none of it has happened."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import swd_fused
from swd_fused import FusedAdamS
from tests.device import DEVICE
from tests.runs import random_grads, random_params, run

pytestmark = [pytest.mark.backends(interpreted=False), pytest.mark.usefixtures("_interrupts_are_raised")]

SHAPES = [(30,), (4, 5), (7,)]
PACKAGE = str(Path(swd_fused.__file__).parent)


class InterruptedAt:
    """Sends SIGINT at the `number`-th moment of what runs: a call of Python, or a return to the package from C. Between
    them Python looks for no signals.

    Not in generators: one that is closed in passing swallows what is raised in it. Nor of the virtual GPU, which no
    signal reaches where there is a real one.
    """

    def __init__(self, number: int) -> None:
        self.left = number

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        is_moment = event == "call" or (event == "c_return" and frame.f_code.co_filename.startswith(PACKAGE))
        if not is_moment or frame.f_code.co_flags & inspect.CO_GENERATOR or is_of_the_virtual_gpu(frame):
            return
        self.left -= 1
        if self.left == 0:
            self.left = -1  # once, also if a generator is next
            signal.raise_signal(signal.SIGINT)

    def step(self, optimizer: FusedAdamS) -> bool:
        """Returns whether the interrupt has come out of the step."""
        return self.run(optimizer.step)

    def run(self, function: Callable[[], object]) -> bool:
        """Returns whether the interrupt has come out of a function."""
        sys.setprofile(self.trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def is_of_the_virtual_gpu(frame: FrameType | None) -> bool:
    while frame is not None and "virtual_gpu" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def new_run(backend: str, groups: int, **options: Any) -> tuple[list[torch.nn.Parameter], FusedAdamS]:
    """The groups differ in what makes buckets of their own. The next step has the largest learning rate so far."""
    torch.manual_seed(0)
    params = random_params(SHAPES)
    amsgrad = [False, True]
    optimizer = FusedAdamS(
        [{"params": params[:1]}, {"params": params[1:], "amsgrad": amsgrad[groups - 1]}], backend=backend, **options
    )
    run(params, random_grads(SHAPES, 2), optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    for param in params:
        param.grad = torch.full_like(param, torch.inf if options.get("skip_nonfinite") else 1.0)
    return params, optimizer


def told(params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> list[torch.Tensor]:
    """All that a step changes but what is logged of it alone."""
    state = [value.clone() for param in params for value in optimizer.state[param].values()]
    numbers = [float(optimizer.skipped_steps), optimizer.metrics().get("clipped_share", 0.0)]
    for group in optimizer.state_dict()["param_groups"]:
        numbers += [group["largest_lr_so_far"], group["calibration_steps"], group["weight_decay"]]
    return [*(param.detach().clone() for param in params), *state, torch.tensor(numbers).nan_to_num(-1.0)]


# Of so many moments one is interrupted: all of them took minutes where steps are of many calls.
MOMENTS = {"cpu": 5, "torch": 23, "triton": 23}

OPTIONS: list[dict[str, Any]] = [
    {},
    {"schedule": "lagged"},
    {"max_grad_norm": 0.5},
    {"skip_nonfinite": True},
    {"corrected_decay": True},
    {"adamw_weight_decay": 0.1, "calibration_steps": 5},
]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_step_is_taken_and_recorded_or_neither(backend: str, options: dict[str, Any], groups: int) -> None:
    """Where a step is skipped, taking it is counting it."""
    if not hasattr(signal, "raise_signal") or threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread gets signals")
    before, after = (told(*new_run(backend, groups, **options)) for _ in range(2))
    params, optimizer = new_run(backend, groups, **options)
    assert all(map(torch.equal, before, after)), "runs are alike"
    optimizer.step()
    after = told(params, optimizer)
    assert not all(map(torch.equal, before, after))
    gc.disable()  # finalizers would be calls too
    seen = set()
    try:
        for number in range(1, 100_000, MOMENTS[backend] if DEVICE == "cpu" else 101):
            params, optimizer = new_run(backend, groups, **options)
            interrupt = InterruptedAt(number)
            was_interrupted = interrupt.step(optimizer)
            now = told(params, optimizer)
            is_before, is_after = (all(map(torch.equal, now, whole)) for whole in (before, after))
            assert is_before or is_after, f"half a step, at moment {number}"
            assert torch.is_grad_enabled(), f"at moment {number}"
            seen.add((was_interrupted, is_after))
            if is_before:
                optimizer.step()
                assert all(map(torch.equal, told(params, optimizer), after)), f"half a beginning, at moment {number}"
            if interrupt.left > 0:
                break
    finally:
        gc.enable()
    # It came before the writes, after them, and not at all.
    assert seen >= {(True, False), (True, True), (False, True)}


Shapes = list[tuple[int, ...]]

# Some larger than what gradient release waits for; and all smaller, which are stepped together in the end.
RELEASED_SHAPES: list[Shapes] = [[(1025, 1024), (30,), (1024, 1025), (7,)], [(30,), (7,)]]


def released_run(shapes: Shapes) -> tuple[list[torch.nn.Parameter], FusedAdamS]:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = FusedAdamS(params, schedule="lagged")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.release_gradients()
    optimizer.param_groups[0]["lr"] *= 2
    return params, optimizer


def backward(params: list[torch.nn.Parameter]) -> None:
    sum(2 * param.sum() for param in params).backward()  # type: ignore[union-attr]


def released(params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> list[tuple[float, ...]]:
    """What a step changes of each parameter, and of all together. The elements of a parameter are all alike."""
    tensors = [[param, *optimizer.state[param].values()] for param in params]
    numbers = [tuple(float(tensor.detach().flatten()[-1]) for tensor in own) for own in tensors]
    return [*numbers, (float(optimizer.exp_avg_sq_mean),)]


@pytest.mark.skipif(DEVICE != "cpu", reason="autograd calls hooks of GPU tensors in threads that get no signals")
@pytest.mark.parametrize("shapes", RELEASED_SHAPES, ids=["large", "small"])
def test_each_parameter_of_a_released_step_has_taken_it_once_or_not(shapes: Shapes) -> None:
    """Whatever is interrupted, the backward pass or the end of the step: the next `step()` ends it, and it is taken by
    those that were stepped before, or by all."""
    before = released(*released_run(shapes))
    params, optimizer = released_run(shapes)
    backward(params)
    optimizer.step()
    after = released(params, optimizer)
    assert not set(before) & set(after)
    for interrupted in ("backward", "step"):
        seen = set()
        for number in range(1, 100_000, 11):
            params, optimizer = released_run(shapes)
            interrupt = InterruptedAt(number)
            if interrupted == "backward":
                was_interrupted = interrupt.run(lambda params=params: backward(params))  # type: ignore[misc]
                optimizer.zero_grad()
                optimizer.step()
            else:
                backward(params)
                was_interrupted = interrupt.step(optimizer)
            now = released(params, optimizer)
            if interrupted == "step" and was_interrupted and now[-1] == before[-1]:
                assert [own in (before[i], after[i]) for i, own in enumerate(now)] == [True] * len(now)
                optimizer.step()
                now = released(params, optimizer)
            taken = [own == after[i] for i, own in enumerate(now)]
            assert [own in (before[i], after[i]) for i, own in enumerate(now)] == [True] * len(now), number
            assert interrupted == "backward" or all(taken), number
            seen.add((was_interrupted, tuple(taken)))
            if interrupt.left > 0:
                break
        assert len(seen) > 1


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
