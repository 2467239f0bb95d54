"""Hooks on parameters, which take up gradients in the backward pass: to release them, or to offload them."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from swd_fused.options import Options
from swd_fused.step.stepper import Groups
from swd_fused.tensors.description import State


class StepCall(NamedTuple):
    """Holds what `optimizer.step()` was told."""

    closure: Callable[[], float] | None
    grad_sumsq: float | Tensor | None
    numel: int | None
    provider: Callable[[], Any] | None  # of the two
    scaling: tuple[Tensor | None, Tensor | None]  # the loss scale, and whether GradScaler has found an infinity


class GradientTaker(ABC):
    """Takes gradients in the backward pass. `optimizer.step()` ends the step."""

    has_ended = False  # whether steps are ordinary ones again

    def __init__(self) -> None:
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._hooks: dict[int, GradientHook] = {}  # by id of the parameter
        self._watched: list[Tensor] = []  # the parameters that these ids belong to
        self._accumulating = 0

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def hook(self, params: Iterable[Tensor], size_of: Callable[[Tensor], int]) -> bool:
        """Has a hook on each of these parameters, and on no other. Returns whether any is new.

        `size_of` is what hooks tell `take` beside the parameter.
        """
        by_id = {id(param): param for param in params if param.requires_grad}
        new = by_id.keys() - self._hooks.keys()
        for gone in self._hooks.keys() - by_id.keys():
            self._hooks.pop(gone).remove()
        for number in new:
            self._hooks[number] = GradientHook(self, by_id[number], size_of(by_id[number]))
        self._watched = list(by_id.values())
        return bool(new)

    @abstractmethod
    def watch(self, groups: Groups, state: State) -> None:
        """Follows the parameters that the optimizer has now: groups are added, and wrappers replace tensors."""

    @abstractmethod
    def take(self, param: Tensor, size: int) -> None:
        """Takes up a gradient that is complete. Called by autograd, or by FSDP2 after its reduction."""

    @abstractmethod
    def end_step(self, groups: Groups, state: State, call: StepCall) -> float | None:
        """Does what `optimizer.step()` has to do."""

    @abstractmethod
    def check_change(self, name: str, value: object, options: Options) -> None:
        """Raises if an option cannot be set to this value now, or ever."""

    def check_between_steps(self, what: str) -> None:  # noqa: B027  # mostly there is nothing to do
        """Raises if a step is begun that has no place for something new."""

    def drop_gradients(self) -> None:  # noqa: B027  # mostly there is nothing to do
        """Forgets gradients that are taken and not used. Called by `zero_grad`."""

    def settle(self) -> None:  # noqa: B027  # mostly there is nothing to do
        """Waits until nobody writes to the state."""

    @abstractmethod
    def forget(self) -> None:
        """Drops a step that was begun, after other state was loaded."""


class GradientHook:
    """Hooks a parameter. Does not keep the optimizer alive, which parameters may outlive."""

    def __init__(self, taker: GradientTaker, param: Tensor, size: int) -> None:
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for number in [number for number, hook in hooks.items() if isinstance(hook, GradientHook)]:
            del hooks[number]  # of an optimizer that this one takes the place of
        self._taker = weakref.ref(taker)
        self._size = size
        self._handle = param.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, param: Tensor) -> None:
        taker = self._taker()
        if taker is not None:
            taker.take(param, self._size)

    def remove(self) -> None:
        self._handle.remove()
