"""The hooks on parameters by which gradient release learns that a gradient is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class StepCall(NamedTuple):
    """Holds what `optimizer.step()` was told."""

    closure: Callable[[], float] | None
    grad_sumsq: float | Tensor | None
    numel: int | None
    provider: Callable[[], Any] | None  # of the two
    scaling: tuple[Tensor | None, Tensor | None]  # the loss scale, and whether GradScaler has found an infinity


class GradientTaker(Protocol):
    def take(self, param: Tensor, size: int) -> None:
        """Takes up a gradient that is complete. Called by autograd, or by FSDP2 after its reduction."""


class GradientHook:
    """Hooks a parameter. Does not keep the optimizer alive, which parameters may outlive.

    `size` is what `take` is told beside the parameter.
    """

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
