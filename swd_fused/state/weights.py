"""The weights that a state stores: masters, and averages of weights.

The master of a float16 parameter is a float32 copy. For a bfloat16 parameter the state stores only a signed remainder
of 16 bits: how many bit patterns the master lies above its nearest bfloat16, which is the parameter. So a parameter
that is written to from outside takes its master along. A master halfway between two parameters rounds to the one of
larger magnitude: csrc/masters.h says why.

Averages are exponential, in at least float32, and follow the master if there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.distributed.sharding import local_tensor, redistributed_like, sharded_like
from swd_fused.options import MASTER, REMAINDER, Options
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.backend import Backend

AVERAGE = "ema_param"

# This entry is in the optimizer's state while weights and averages are exchanged. With it no snapshot holds, and a new
# one refuses the step, so that ordinary steps need no check.
EXCHANGED = "averaged_params"


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """Returns the masters of bfloat16 parameters, in float32.

    Bit patterns just below zero and just above infinity are NaN. A remainder that leads there counts as 0: it cannot
    belong to the parameter, which must have been written to from outside.
    """
    bits = param.view(torch.int16).to(torch.int32) << 16
    masters = (bits + remainder).view(torch.float32)
    return torch.where(masters.isnan(), bits.view(torch.float32), masters)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 masters into bfloat16 parameters and remainders. Some NaNs would round to -0: all become one."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), 0x7FC00000, bits)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """Returns the remainder of a float32 master beside its bfloat16 parameter, 0 if it does not round to that.

    A master halfway above a parameter, which torch rounds down to an even one, loses its last bit.
    """
    difference = master.view(torch.int32).to(torch.int64) - (param.view(torch.int16).to(torch.int64) << 16)
    rounds_to_param = difference.abs() <= 0x8000
    return difference.clamp(-0x8000, 0x7FFF).masked_fill(~rounds_to_param, 0).to(torch.int16)


def master_of(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns a parameter's master as a float32 tensor, or the parameter if it has none. A DTensor's is a DTensor."""
    if REMAINDER in state:
        return sharded_like(param, joined(local_tensor(param).detach(), local_tensor(state[REMAINDER])))
    master: Tensor = state.get(MASTER, param)
    return master.detach()


def convert_master(state: dict[str, Any], param: Tensor, options: Options, backend: Backend) -> None:
    """Makes the master that a step needs, from a master saved in another form or from the parameter. Drops masters that
    are not needed."""
    needed = options.master_key(param.dtype)
    local = local_tensor(param).detach()
    if needed == REMAINDER and REMAINDER not in state:
        remainder = backend.new_moment(local, torch.int16, local.device)
        if MASTER in state:
            remainder.copy_(remainder_of(local, local_tensor(state[MASTER]).to(torch.float32)))
        state[REMAINDER] = sharded_like(param, remainder)
    if needed == MASTER:
        state[MASTER] = (
            state[MASTER].to(torch.float32) if MASTER in state else param.detach().to(torch.float32, copy=True)
        )
    for key in {MASTER, REMAINDER} - {needed}:
        state.pop(key, None)


def warn_of_dropped_masters(saved: Mapping[Tensor, Mapping[str, Any]], options: Options) -> None:
    """Warns, once, if saved masters have more precision than parameters but the optimizer keeps none."""
    dropped: Counter[torch.dtype] = Counter()
    for param, state in saved.items():
        own = options.master_key(param.dtype)
        if REMAINDER in state and own != REMAINDER:
            dropped[param.dtype] += 1
        elif MASTER in state and own is None:
            master = redistributed_like(param, state[MASTER]).to(param.device, torch.float64)
            if not torch.equal(local_tensor(param).detach().to(torch.float64), master):
                dropped[param.dtype] += 1
    if dropped:
        counts = ", ".join(f"{count} of {dtype}" for dtype, count in dropped.items())
        warn_user(
            f"The state dict has master weights that parameters ({counts}) do not hold: they are dropped. To keep the "
            "masters of 16-bit parameters build the optimizer with master_weights=True. To go on in float32 save "
            "optimizer.master_param(param) of each as the model's parameters."
        )


# --- Averages


def convert_average(state: dict[str, Any], param: Tensor, ema_decay: float | None, backend: Backend) -> None:
    """Makes the average that a step needs, starting as the weight, or widens one that was saved in 16 bits."""
    dtype = torch.promote_types(param.dtype, torch.float32)
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
