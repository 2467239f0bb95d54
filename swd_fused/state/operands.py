"""The state's tensors as kernels take them: a column for each operand, in whichever form the state stores it.

`StateColumns` is the only list of operands: loading, and the addresses that Triton's kernels read, follow from it. The
C++ operators take the same lists in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.distributed.sharding import PLAIN_TYPES, local_tensor
from swd_fused.options import MASTER, REMAINDER, Options
from swd_fused.state.eight_bit import CODES, SCALES
from swd_fused.state.weights import AVERAGE


class StateColumns(NamedTuple):
    """Holds the tensors of a bucket's state, except its step counts, as lists with a place for each parameter.

    A list is empty if no parameter has such a tensor. If only some have it, an empty tensor stands for a missing one.
    """

    exp_avgs: list[Tensor]  # or 8-bit codes
    exp_avg_sqs: list[Tensor]  # or 8-bit codes
    max_exp_avg_sqs: list[Tensor]
    masters: list[Tensor]  # or remainders
    ema_params: list[Tensor]
    exp_avg_scales: list[Tensor]  # for codes
    exp_avg_sq_scales: list[Tensor]


# The keys under which the state stores each column's tensor. A state has at most one of a column's keys.
KEYS: dict[str, tuple[str, ...]] = {
    "exp_avgs": ("exp_avg", CODES["exp_avg"]),
    "exp_avg_sqs": ("exp_avg_sq", CODES["exp_avg_sq"]),
    "max_exp_avg_sqs": ("max_exp_avg_sq",),
    "masters": (MASTER, REMAINDER),
    "ema_params": (AVERAGE,),
    "exp_avg_scales": (SCALES["exp_avg"],),
    "exp_avg_sq_scales": (SCALES["exp_avg_sq"],),
}

# The columns whose tensors do not have the parameter's shape, and the columns whose tensors do.
SCALE_COLUMNS = [name for name, keys in KEYS.items() if keys[0] in SCALES.values()]
PARAM_COLUMNS = [name for name in KEYS if name not in SCALE_COLUMNS]

STORED = [key for keys in KEYS.values() for key in keys]
SECOND_MOMENTS = [*KEYS["exp_avg_sqs"], *KEYS["exp_avg_sq_scales"], *KEYS["max_exp_avg_sqs"]]


def unused_columns(group: Mapping[str, Any], options: Options, param_dtype: torch.dtype) -> frozenset[str]:
    """Returns the columns that a step leaves alone in a group, though its state may have them from earlier steps."""
    is_used = {
        "max_exp_avg_sqs": group["amsgrad"],
        "masters": options.master_key(param_dtype) is not None,
        "ema_params": group["ema_decay"] is not None,
    }
    return frozenset(name for name in is_used if not is_used[name])


def columns_of(states: Sequence[dict[str, Any]], unused: Collection[str]) -> StateColumns:
    """Returns the columns of some parameters' state: local parts, and complex tensors as pairs of real numbers."""
    held = set().union(*states)
    lists: dict[str, list[Tensor]] = {name: [] for name in KEYS}
    for name, keys in KEYS.items():
        keys = tuple(key for key in keys if key in held)
        if keys and name not in unused:
            lists[name] = _column(keys, states)
    return StateColumns(**lists)


def _column(keys: Sequence[str], states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Returns each state's tensor under one of these keys, or an empty tensor if it has none."""
    found = [state.get(keys[0]) for state in states]
    if len(keys) > 1 or any(map(is_, found, repeat(None))):
        found = [next((state[key] for key in keys if key in state), None) for state in states]
    tensors = [tensor for tensor in found if tensor is not None]
    none = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
    if len(tensors) < len(found):
        tensors = [none if tensor is None else tensor for tensor in found]
    return tensors if are_plain(tensors) else [as_real(tensor) for tensor in map(local_tensor, tensors)]


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Returns whether no tensor is complex, a DTensor or another subclass."""
    return set(map(type, tensors)) <= PLAIN_TYPES and not any(map(Tensor.is_complex, tensors))


def as_real(tensor: Tensor) -> Tensor:
    """Returns a view of a complex tensor as pairs of real numbers, and any other tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
