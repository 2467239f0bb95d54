"""Exchanges weights with their averages temporarily, or copies averages into other tensors.

state/weights.py says how the state stores averages. Each step's update advances them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from swd_fused.core.interrupts import DeferredInterrupts
from swd_fused.devices import graphs
from swd_fused.distributed.sharding import is_dtensor, local_tensor, redistributed_like
from swd_fused.options import MASTER, REMAINDER
from swd_fused.state.load import check_state
from swd_fused.state.weights import AVERAGE, EXCHANGED, joined, master_of, refuse_exchanged, split

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS


@contextmanager
def exchanged(optimizer: FusedAdamS) -> Iterator[None]:
    """Exchanges weights with averages, and back at the end. Refuses wrong use before anything is exchanged."""
    asked = "FusedAdamS got averaged_params()"
    averaging = [group for group in optimizer.param_groups if group["ema_decay"] is not None]
    if not averaging:
        raise RuntimeError(
            f"{asked} without averages of weights, wanted ema_decay in at least one parameter group. Pass "
            "ema_decay=0.999 to the constructor."
        )
    refuse_exchanged(optimizer.state, "averaged_params()")
    release = optimizer._gradient_release
    if torch._C._current_graph_task_id() != -1 or (release is not None and release.begun is not None):
        raise RuntimeError(f"{asked} in the middle of a step or within a backward pass, wanted it between steps.")
    if graphs.is_capturing_on({param.device for param in optimizer.numbered_params()}):
        raise RuntimeError(
            f"{asked} in the capture of a CUDA graph, wanted it outside. Exchange before an evaluation is captured, "
            "and whenever it is replayed."
        )
    state: dict[Any, Any] = optimizer.state
    weights = [
        Exchange.of(param, state[param])
        for group in averaging
        for param in group["params"]
        if AVERAGE in state.get(param, {})
    ]
    averages: list[Exchange] = []  # already exchanged: not all if memory ran out
    try:
        _exchange(weights, averages, state)
        yield
    finally:
        _exchange(averages, weights, state, is_back=True)


class Exchange(NamedTuple):
    """Holds the local tensors of a parameter that are exchanged."""

    param: Tensor
    average: Tensor
    master: Tensor | None  # or its remainder
    rounded: list[Tensor]  # the weight, while the parameter is its average rounded to 16 bits and there is no master

    @staticmethod
    def of(param: Tensor, state: Mapping[str, Any]) -> Exchange:
        master = state.get(MASTER, state.get(REMAINDER))
        check_state(state, param)
        local, average = local_tensor(param), local_tensor(state[AVERAGE])
        return Exchange(local, average, None if master is None else local_tensor(master), [])

    def apply(self) -> None:
        param, average, master, rounded = self
        if master is None and average.dtype.itemsize > param.dtype.itemsize:
            # The parameter cannot hold the whole average, so that stays in place and the weight is kept aside.
            if rounded:
                param.copy_(rounded.pop())
            else:
                rounded.append(param.clone())
                param.copy_(average)
            return
        if master is None:
            weight = param.clone()
            param.copy_(average)
        elif master.dtype == torch.int16:
            weight = joined(param, master)
            for tensor, value in zip((param, master), split(average), strict=True):
                tensor.copy_(value)
        else:  # a master is out of date where the parameter was written to from outside
            weight = torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))
            master.copy_(average)
            param.copy_(average)
        average.copy_(weight)


def _exchange(todo: list[Exchange], done: list[Exchange], state: dict[Any, Any], is_back: bool = False) -> None:
    """Exchanges parameter by parameter, so that one temporary copy of the largest one is enough."""
    interrupts = DeferredInterrupts()
    try:
        state[EXCHANGED] = {}
        with torch.inference_mode():  # else parameters made in inference mode could not be written to
            while todo:
                todo[-1].apply()
                done.append(todo.pop())
        if is_back:
            del state[EXCHANGED]
    finally:
        interrupts.deliver()


def copy_to(target: nn.Module | Iterable[Tensor], optimizer: FusedAdamS) -> None:
    """Copies averages, or weights without one, into a module by the parameters' names, or into tensors in order."""
    refuse_exchanged(optimizer.state, "copy_averages()")
    params = optimizer.numbered_params()
    if isinstance(target, nn.Module):
        own, groups = dict(target.named_parameters()), optimizer.param_groups
        names = [name for group in groups for name in group.get("param_names", ())]
        target = [own[name] for name in names if name in own]
    targets = list(target)
    if [tensor.shape for tensor in targets] != [param.shape for param in params] or set(params) & set(targets):
        raise ValueError(
            f"copy_averages got {len(targets)} tensors for {len(params)} parameters, wanted another one of the same "
            "shape for each, in the optimizer's order; or a copy of the model, if the optimizer was given "
            "model.named_parameters()."
        )
    with torch.no_grad():
        for tensor, param in zip(targets, params, strict=True):
            state = optimizer.state.get(param) or {}
            value: Any = state[AVERAGE] if AVERAGE in state else master_of(param, state)
            if is_dtensor(tensor):
                local_tensor(tensor).copy_(redistributed_like(tensor, value))
            else:
                tensor.copy_(value.full_tensor() if is_dtensor(value) else value)
