"""Exchanges weights and their averages for a while.

State has the averages as state/averages.py says. The update of an element advances them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.core.step import DeferredInterrupts
from swd_fused.devices import graphs
from swd_fused.distributed.sharding import local_tensor
from swd_fused.options import MASTER, REMAINDER
from swd_fused.state.averages import AVERAGE, EXCHANGED, refuse_exchanged
from swd_fused.state.load import check_fits
from swd_fused.state.masters import joined, split

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS


def check_use_of_warmup(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a warm-up where nothing is averaged."""
    if any(group["ema_warmup"] for group in groups) and all(group["ema_decay"] is None for group in groups):
        raise ValueError(
            "FusedAdamS got ema_warmup=True without ema_decay, wanted both: it is what the warm-up leads to. Pass "
            "ema_decay=0.999, or leave ema_warmup out."
        )


@contextmanager
def exchanged(optimizer: FusedAdamS) -> Iterator[None]:
    """Exchanges weights and averages, and back. Refuses bad use before anything moves."""
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
    averages: list[Exchange] = []  # of which the parameter is one; fewer if memory ran out
    try:
        _exchange(weights, averages, state)
        yield
    finally:
        _exchange(averages, weights, state, is_back=True)


class Exchange(NamedTuple):
    """The local tensors of a parameter that are exchanged."""

    param: Tensor
    average: Tensor
    master: Tensor | None  # or its remainder
    rounded: list[Tensor]  # the parameter, while it is an average rounded to 16 bits and no master has its value

    @staticmethod
    def of(param: Tensor, state: Mapping[str, Any]) -> Exchange:
        master = state.get(MASTER, state.get(REMAINDER))
        local, average = local_tensor(param), local_tensor(state[AVERAGE])
        check_fits(local, average, tuple(local.shape))
        return Exchange(local, average, None if master is None else local_tensor(master), [])

    def apply(self) -> None:
        param, average, master, rounded = self
        if master is None and average.dtype.itemsize > param.dtype.itemsize:
            # It could not hold the average, which stays where it is.
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
        else:  # where someone has written to the parameter its master is out of date
            weight = torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))
            master.copy_(average)
            param.copy_(average)
        average.copy_(weight)


def _exchange(todo: list[Exchange], done: list[Exchange], state: dict[Any, Any], is_back: bool = False) -> None:
    """Exchanges one after another, so that one temporary copy of the largest parameter is enough."""
    interrupts = DeferredInterrupts()
    try:
        state[EXCHANGED] = {}
        with torch.inference_mode():  # in which parameters that were made in inference mode can be written to as well
            while todo:
                todo[-1].apply()
                done.append(todo.pop())
        if is_back:
            del state[EXCHANGED]
    finally:
        interrupts.deliver()
