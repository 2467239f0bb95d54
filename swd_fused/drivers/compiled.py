"""A step within torch.compile: one opaque operator, which takes the same eager step when the graph runs.

Hyper-parameters are read when it runs. So a scheduler makes nothing compile again if `lr` is a tensor; torch.compile
itself looks at numbers in an optimizer's groups, and compiles for each new one.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS

_OPTIMIZERS: WeakValueDictionary[int, FusedAdamS] = WeakValueDictionary()
_HANDLES = count()


def new_handle(optimizer: FusedAdamS) -> int:
    """Registers an optimizer, and returns the number by which a graph, which cannot hold it, finds it."""
    handle = next(_HANDLES)
    _OPTIMIZERS[handle] = optimizer
    return handle


@torch.library.custom_op("swd_fused::optimizer_step", mutates_args=("params",))
def optimizer_step(params: list[Tensor], grads: list[Tensor], numbers: list[int], handle: int) -> None:
    """Compilers may pass copies of the parameters, which they copy back later."""
    optimizer = _OPTIMIZERS[handle]
    own = optimizer.numbered_params()
    pairs = [(own[number], given) for number, given in zip(numbers, params, strict=True)]
    copies = [(mine, given) for mine, given in pairs if mine.data_ptr() != given.data_ptr()]
    present = dict(zip(numbers, grads, strict=True))
    with torch.no_grad():
        for mine, given in copies:
            mine.copy_(given)
        optimizer.step_with([present.get(number) for number in range(len(own))])
        for mine, given in copies:
            given.copy_(mine)


@optimizer_step.register_fake
def _(params: list[Tensor], grads: list[Tensor], numbers: list[int], handle: int) -> None:
    return None


def step_within_a_graph(params: list[Tensor], handle: int) -> None:
    """Does only what torch.compile can follow: finds out which parameters have gradients."""
    numbers = [number for number, param in enumerate(params) if param.grad is not None]
    grads = [param.grad for param in params if param.grad is not None]
    with torch.no_grad():
        optimizer_step([params[number] for number in numbers], grads, numbers, handle)
