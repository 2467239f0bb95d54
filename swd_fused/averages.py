"""Averages of weights, as users see them: exchanged with the weights for a while, or copied into other tensors.

How a state has them is in state/weights.py. The update of an element advances them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from swd_fused.core.step import DeferredInterrupts
from swd_fused.devices import graphs
from swd_fused.distributed.sharding import full_tensor, is_dtensor, local_tensor, redistributed_like
from swd_fused.options import MASTER, REMAINDER
from swd_fused.state.load import check_state
from swd_fused.state.weights import AVERAGE, EXCHANGED, joined, master_of, refuse_exchanged, split

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS

Groups = Sequence[Mapping[str, Any]]


def _averaging(groups: Groups) -> list[Mapping[str, Any]]:
    return [group for group in groups if group["ema_decay"] is not None]


def _refuse_without_averages(groups: Groups, asked: str) -> None:
    if not _averaging(groups):
        raise RuntimeError(
            f"FusedAdamS got {asked} without averages of weights, wanted ema_decay in at least one parameter group. "
            "Pass ema_decay=0.999 to the constructor."
        )


# --- Exchanged in place


@contextmanager
def exchanged(optimizer: FusedAdamS) -> Iterator[None]:
    """Exchanges weights and averages, and back. Refuses bad use before anything moves."""
    asked = "FusedAdamS got averaged_params()"
    _refuse_without_averages(optimizer.param_groups, "averaged_params()")
    refuse_exchanged(optimizer.state, "averaged_params()")
    release = optimizer._gradient_release
    if torch._C._current_graph_task_id() != -1 or (release is not None and release.is_begun):
        raise RuntimeError(
            f"{asked} in the middle of a step or within a backward pass, wanted it between steps. Call it after "
            "optimizer.step()."
        )
    if graphs.is_capturing_on({param.device for param in optimizer.numbered_params()}):
        raise RuntimeError(
            f"{asked} in the capture of a CUDA graph, wanted it outside. Exchange before an evaluation is captured, "
            "and whenever it is replayed: parameters stay where they are."
        )
    state: dict[Any, Any] = optimizer.state
    weights = [
        Exchange.of(param, state[param])
        for group in _averaging(optimizer.param_groups)
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
        check_state(state, param)
        local, average = local_tensor(param), local_tensor(state[AVERAGE])
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


# --- Copied


def copy_to(target: nn.Module | Iterable[Tensor], optimizer: FusedAdamS) -> None:
    """Copies averages, or weights that have none, into tensors of the same shapes."""
    refuse_exchanged(optimizer.state, "copy_averages()")
    _refuse_without_averages(optimizer.param_groups, "copy_averages()")
    params = optimizer.numbered_params()
    targets = _named(target, optimizer.param_groups) if isinstance(target, nn.Module) else list(target)
    if [tensor.shape for tensor in targets] != [param.shape for param in params]:
        raise ValueError(
            f"copy_averages got {len(targets)} tensors for {len(params)} parameters, wanted one of the same shape for "
            "each parameter, in the optimizer's order. Pass the copy's parameters as the model's were passed to the "
            "optimizer."
        )
    if not set(map(id, params)).isdisjoint(map(id, targets)):
        raise ValueError(
            "copy_averages got a parameter that this optimizer trains, wanted a copy of it. Pass copy.deepcopy(model), "
            "or exchange both: with optimizer.averaged_params()."
        )
    averaged = {param for group in _averaging(optimizer.param_groups) for param in group["params"]}
    with torch.no_grad():
        for tensor, param in zip(targets, params, strict=True):
            state = optimizer.state.get(param) or {}
            value = state[AVERAGE] if param in averaged and AVERAGE in state else master_of(param, state)
            if is_dtensor(tensor):
                local_tensor(tensor).copy_(redistributed_like(tensor, value))
            else:
                tensor.copy_(full_tensor(value) if is_dtensor(value) else value)


def _named(module: nn.Module, groups: Groups) -> list[Tensor]:
    """Returns a module's parameters by the names that they have in the optimizer's groups."""
    own = dict(module.named_parameters())
    names = [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]
    unknown = next((name for name in names if name not in own), "")
    if unknown != "":
        problem = "its parameters have no names here" if unknown is None else f"it has no parameter {unknown}"
        raise ValueError(
            f"copy_averages got a {type(module).__name__}, but {problem}, wanted one with the names that the "
            "optimizer got. Pass model.named_parameters() to the optimizer; or its parameters here, in the optimizer's "
            "order: copy_averages(module.parameters())."
        )
    return [own[name] for name in names]
