"""Gradient release: parameters are stepped during the backward pass, as soon as their gradients are complete."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from swd_fused.core.interrupts import DeferredInterrupts
from swd_fused.core.schedule import Gate
from swd_fused.core.snapshot import State
from swd_fused.core.sources import StepCall
from swd_fused.core.step import Step, Stepper
from swd_fused.core.values import Groups
from swd_fused.distributed.refusals import refuse_late_reduction
from swd_fused.distributed.sharding import local_tensor, sharding_in
from swd_fused.options import Options
from swd_fused.state.storage import has_moments

# Small gradients wait until so many bytes can be stepped together, counting each rank's even share of a parameter. The
# host goes through all tensors of the model in each update, so a thousand small layers must not be a thousand updates.
# These bytes are few beside the largest layer's gradient.
GATHERED_BYTES = 4 << 20


@dataclass
class ReleasedStep:
    """Holds a step that backward passes take, until `optimizer.step()` ends it."""

    step: Step
    keeps_gradients: bool  # True in a first step, which is exact and needs all gradients
    stepped: set[Tensor] = field(default_factory=set)
    gathered: dict[Tensor, None] = field(default_factory=dict)  # an ordered set
    gathered_bytes: int = 0


class GradientRelease:
    """Steps each parameter of an optimizer in the backward pass and frees its gradient, until `remove()` is called.

    The lagged mean follows from the state before the step, so it is known before the first gradient. Each update is
    that of an ordinary step in which all gradients but a few are missing. A first step is exact and needs all
    gradients, so `optimizer.step()` takes it.
    """

    def __init__(self, stepper: Stepper, groups: Groups, state: State) -> None:
        check_can_release(stepper.options)
        self._stepper = stepper
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._handles: dict[Tensor, Any] = {}  # the handles of hooks
        self._accumulating = 0
        self._knows_wrappers = False
        self._last_events: dict[torch.device, torch.cuda.Event] = {}  # recorded after updates
        self._is_removed = False
        self.begun: ReleasedStep | None = None  # by a backward pass, to be ended by `optimizer.step()`
        self.watch(groups, state)

    @property
    def has_ended(self) -> bool:
        """Whether `remove` was called, and no step remains for `optimizer.step()` to end."""
        return self._is_removed and self.begun is None

    def remove(self) -> None:
        """Ends gradient release. A step that was begun is still ended by `optimizer.step()`."""
        for handle in self._handles.values():
            handle.remove()
        self._is_removed = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Makes backward passes within the context only accumulate gradients."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def check_change(self, name: str, value: object, options: Options) -> None:
        """Raises if an option cannot be changed in the middle of a step, or does not go with gradient release."""
        if self.begun is not None:
            raise RuntimeError(
                f"FusedAdamS got {name}={value!r} in the middle of a step, with release_gradients() on: it holds for "
                "whole steps. Call optimizer.step() first."
            )
        check_can_release(options)

    def watch(self, groups: Groups, state: State) -> None:
        """Hooks exactly the present parameters: groups may have been added, and tensors replaced by wrappers."""
        self._groups, self._state = groups, state
        group_of = {param: group for group in groups for param in group["params"] if param.requires_grad}
        for gone in self._handles.keys() - group_of.keys():
            self._handles.pop(gone).remove()
        for param in group_of.keys() - self._handles.keys():
            hooks: dict[int, object] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for number in [number for number, hook in hooks.items() if getattr(hook, "func", None) is take_up]:
                del hooks[number]  # the hook of an optimizer that this one replaces
            # The same on all ranks: they must step together, since gradients may have to be redistributed among them.
            sharding = sharding_in(group_of[param], param, self._stepper.sharded_over)
            size = param.numel() * param.element_size() // prod(over.size() for over in sharding)
            hook = partial(take_up, weakref.ref(self), size)
            self._handles[param] = param.register_post_accumulate_grad_hook(hook)

    # --- A step

    @_disable_dynamo
    @torch.no_grad()
    def take(self, param: Tensor, size: int) -> None:
        """Takes up a complete gradient. Called by autograd, or by FSDP2 after its reduction."""
        with self._lock:
            if self._accumulating or self._is_removed:
                return
            begun = self._begin()
            if begun.keeps_gradients:
                return
            if param in begun.stepped or param in begun.gathered:
                refuse_second_gradient(param)
            begun.gathered[param] = None
            begun.gathered_bytes += size
            if begun.gathered_bytes >= GATHERED_BYTES:
                self._update(begun, list(begun.gathered))

    @_disable_dynamo
    def end_step(self, groups: Groups, state: State, call: StepCall) -> None:
        """Steps the parameters that still have gradients, and ends the step."""
        if any(value is not None for value in call):
            raise RuntimeError(
                "FusedAdamS.step() got grad_sumsq or was called by a GradScaler, with release_gradients() on, where "
                "both come after most gradients were stepped and freed. Leave grad_sumsq out, and train in bfloat16, "
                "which needs no loss scaling; or train without gradient release."
            )
        interrupts = DeferredInterrupts()  # until gradients are freed too, and torch's modes are restored
        try:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                self._groups, self._state = groups, state
                begun = self._begin()
                rest = [param for param in params_of(groups) if param.grad is not None]
                for param in rest:
                    if param in begun.stepped:
                        refuse_second_gradient(param)
                begun.step.is_partial = False
                try:
                    self._update(begun, rest)
                    begun.step.end()
                    self.begun = None
                finally:
                    begun.step.deliver_interrupts()
                if not self._is_removed:
                    self.watch(groups, state)
        finally:
            interrupts.deliver()

    def _begin(self) -> ReleasedStep:
        """Returns the present step, or begins one."""
        if self.begun is None:
            if not self._knows_wrappers:  # only now: the model may be wrapped after `release_gradients`
                refuse_late_reduction(params_of(self._groups))
                self._knows_wrappers = True
            step = Step(self._stepper, self._groups, self._state, self._stepper.source, Gate())
            step.is_partial = True
            has_state = any(isinstance(entry, dict) and has_moments(entry) for entry in self._state.values())
            self.begun = ReleasedStep(step, keeps_gradients=not has_state)
        return self.begun

    def _update(self, begun: ReleasedStep, params: list[Tensor]) -> None:
        """Steps these parameters and frees their gradients. A first step keeps all gradients until `end_step`.

        FSDP2 and autograd call hooks on streams of their own, so on GPUs each update waits for the one before.
        """
        every, now = params_of(self._groups), set(params)
        grads = [param.grad if param in now else None for param in every]
        for device, event in self._last_events.items():
            torch.cuda.current_stream(device).wait_event(event)
        for param, grad in zip(every, grads, strict=True):
            if grad is not None and param.is_cuda:
                # The gradient is freed before the update has run, and its memory may belong to another stream.
                local_tensor(grad).record_stream(torch.cuda.current_stream(param.device))
        try:
            if not begun.step.update(every, grads):
                begun.keeps_gradients = True
                return
            for device in {param.device for param in params if param.is_cuda}:
                self._last_events[device] = torch.cuda.current_stream(device).record_event()
            begun.stepped |= now
            for param in params:
                param.grad = None
        finally:
            begun.gathered, begun.gathered_bytes = {}, 0
            if begun.step.is_partial:
                begun.step.deliver_interrupts()


def take_up(release: weakref.ref[GradientRelease], size: int, param: Tensor) -> None:
    """Passes a gradient to the release, as a parameter's hook. It does not keep the optimizer alive."""
    alive = release()
    if alive is not None:
        alive.take(param, size)


def params_of(groups: Groups) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


# --- Refused uses of gradient release


def check_can_release(options: Options) -> None:
    if options.needs_norm is not None:
        problem = f"{options.needs_norm}, which needs the norm of all gradients before the first update. Leave that out"
    elif not options.needs_one_pass:
        problem = 'schedule="exact", whose mean is not known before all gradients are. Use schedule="lagged"'
    else:
        return
    raise ValueError(
        f"release_gradients does not go with {problem}; or end gradient release by remove() of what it returned."
    )


def refuse_step_in_backward() -> NoReturn:
    """Refuses hooks that step each parameter as soon as its gradient is there: each would get its own schedule."""
    raise RuntimeError(
        "FusedAdamS.step() was called within a backward pass, where the mean over the whole model is not known yet. "
        'Call step() after backward(). To free gradients early use schedule="lagged" and call '
        "optimizer.release_gradients() once; step() after backward() then ends the step."
    )


def refuse_second_gradient(param: Tensor) -> NoReturn:
    raise RuntimeError(
        f"A parameter of shape {tuple(param.shape)} got a second gradient before optimizer.step(), but with "
        "release_gradients() on its first gradient is used up. Run all backward passes but the last within "
        "optimizer.accumulate_gradients(). After a backward pass that has failed call optimizer.zero_grad() and "
        "optimizer.step(), which ends the step for the parameters that have taken it."
    )
