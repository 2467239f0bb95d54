"""Steps within torch.compile: one opaque operator, which takes the same eager step when the graph runs.

Hyper-parameters are read when the graph runs. So a scheduler causes no recompilation if `lr` is a tensor. If it is a
number, torch.compile itself guards it as part of the optimizer's groups, and recompiles for each new value.
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
    """Registers an optimizer, and returns a number by which a graph finds it, since a graph cannot hold an object."""
    handle = next(_HANDLES)
    _OPTIMIZERS[handle] = optimizer
    return handle


@torch.library.custom_op("swd_fused::optimizer_step", mutates_args=("params",))
def optimizer_step(params: list[Tensor], grads: list[Tensor], numbers: list[int], handle: int) -> None:
    """Takes an eager step. Compilers may pass copies of the parameters, which they copy back later."""
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
    """Calls the operator with the parameters that have gradients. torch.compile traces only this selection."""
    numbers = [number for number, param in enumerate(params) if param.grad is not None]
    grads = [param.grad for param in params if param.grad is not None]
    with torch.no_grad():
        optimizer_step([params[number] for number in numbers], grads, numbers, handle)
