"""The state of one parameter, as torch.optim.Adam has it: made when it takes its first step, and kept as asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swd_fused.backends import Backend
from swd_fused.distributed.sharding import local_tensor, sharded_like
from swd_fused.options import MASTER, Options

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def initialized(
    state: dict[str, Any], param: Tensor, options: Options, amsgrad: bool, backend: Backend
) -> dict[str, Any]:
    """Adds what a step needs and is not there, and drops a master that a converted parameter has no use for."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for key in ("exp_avg", "exp_avg_sq"):
            dtype = options.moment_dtype(key, param.dtype)
            state[key] = sharded_like(param, backend.new_moment(local_tensor(param), dtype, param.device))
    for key in MOMENTS:
        if key in state:  # wider where the parameter has become so
            state[key] = state[key].to(options.kept_dtype(key, state[key].dtype, param.dtype))
    if amsgrad and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    if not options.needs_master(param.dtype):
        state.pop(MASTER, None)
    elif MASTER not in state:
        state[MASTER] = param.detach().to(torch.float32, copy=True)
    return state
