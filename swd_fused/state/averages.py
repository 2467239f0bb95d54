"""Averages of weights in the state: exponential ones, in at least float32, of the master where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.distributed.sharding import local_tensor, sharded_like
from swd_fused.state.masters import master_of

if TYPE_CHECKING:
    from swd_fused.core.backend import Backend

AVERAGE = "ema_param"

# An entry of the optimizer's state as long as weights and averages are exchanged. By it no snapshot holds, so that a
# step comes to where it is refused, and steps at other times need not ask.
EXCHANGED = "averaged_params"


def average_dtype(param_dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(param_dtype, torch.float32)


def convert_average(state: dict[str, Any], param: Tensor, ema_decay: float | None, backend: Backend) -> None:
    """Makes the average that a step needs, which starts as the weight, or widens one that was saved in 16 bits."""
    dtype = average_dtype(param.dtype)
    if AVERAGE in state:
        state[AVERAGE] = state[AVERAGE].to(dtype)
    elif ema_decay is not None:
        average = backend.new_moment(local_tensor(param), dtype, param.device)
        state[AVERAGE] = sharded_like(param, average.copy_(local_tensor(master_of(param, state))))


def refuse_exchanged(state: Mapping[Any, Any], asked: str) -> None:
    """Raises within `averaged_params()`, where the state has weights in place of averages."""
    if EXCHANGED in state:
        raise RuntimeError(
            f"FusedAdamS got {asked} within averaged_params(), where parameters are averages and the state has the "
            "weights, wanted it outside. Leave the `with` block first."
        )
