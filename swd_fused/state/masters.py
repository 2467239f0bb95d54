"""Master weights in the state: float32 copies of float16 parameters, and the two bytes that bfloat16 ones lack.

These are a signed remainder of 16 bits: by how many patterns of bits the master lies above its nearest bfloat16, which
is the parameter. So a parameter that others write to takes its master along. Halfway between two parameters the upper
one in magnitude is taken: csrc/masters.h says why.
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


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """Returns the masters of bfloat16 parameters, in float32.

    Below zero and above infinity are no numbers. A remainder that would lead there counts as 0: it cannot belong to the
    parameter, so others have written to that.
    """
    bits = param.view(torch.int16).to(torch.int32) << 16
    masters = (bits + remainder).view(torch.float32)
    return torch.where(masters.isnan(), bits.view(torch.float32), masters)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 masters as bfloat16 parameters and remainders. NaN has none, or the parameter might be -0."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), 0x7FC00000, bits)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """Returns what a float32 master is beside its bfloat16 parameter, and 0 where it does not round to that.

    Of masters that torch has rounded halfway down to an even parameter the last bit is lost.
    """
    difference = master.view(torch.int32).to(torch.int64) - (param.view(torch.int16).to(torch.int64) << 16)
    rounds_to_param = difference.abs() <= 0x8000
    return difference.clamp(-0x8000, 0x7FFF).masked_fill(~rounds_to_param, 0).to(torch.int16)


# --- In the state


def master_of(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns a parameter's master as a float32 tensor, itself if it has none. A DTensor's is a DTensor."""
    if REMAINDER in state:
        return sharded_like(param, joined(local_tensor(param).detach(), local_tensor(state[REMAINDER])))
    master: Tensor = state.get(MASTER, param)
    return master.detach()


def convert_master(state: dict[str, Any], param: Tensor, options: Options, backend: Backend) -> None:
    """Makes the master that a step needs, of one that was saved in another way or of the parameter, and drops what a
    converted parameter has no use for."""
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


# --- Masters that are loaded without `master_weights=True`


def adoptable_masters(saved: Mapping[Tensor, Mapping[str, Any]], options: Options) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters that can hold their saved masters, each with its master.

    Warns, once, of masters that are dropped. Refuses remainders of parameters that are not, and were not, bfloat16.
    """
    adopted: list[tuple[Tensor, Tensor]] = []
    dropped: Counter[torch.dtype] = Counter()
    for param, state in saved.items():
        key = next((key for key in (MASTER, REMAINDER) if key in state), None)
        if key is None:
            continue
        local = local_tensor(param).detach()
        if key == REMAINDER and not _is_bfloat16(local):
            raise ValueError(
                f"The state dict has {REMAINDER} for a parameter of shape {tuple(param.shape)}, {param.dtype}, wanted "
                "one of torch.bfloat16, or one that has such values: the remainder is what its master has beyond "
                "them. Load the model's state first, or save optimizer.master_param(param) in place of the parameter."
            )
        if options.master_key(param.dtype) is not None:
            continue
        master = redistributed_like(param, state[key]).to(param.device)
        if key == REMAINDER:
            master = joined(local.to(torch.bfloat16), master)
        if _is_rounded_copy(local, master):
            adopted.append((local, master))
        elif not _is_equal(local, master):
            dropped[param.dtype] += 1
    if dropped:
        counts = ", ".join(f"{count} of {dtype}" for dtype, count in dropped.items())
        warn_user(
            f"The state dict has float32 master weights for parameters that do not hold their values ({counts}): they "
            "are dropped. To keep the masters of 16-bit parameters build the optimizer with master_weights=True; to go "
            "on in float32 load the model's state before the optimizer's.",
        )
    return adopted


def _is_bfloat16(param: Tensor) -> bool:
    return param.dtype == torch.bfloat16 or torch.equal(param.to(torch.bfloat16).to(param.dtype), param)


def _is_rounded_copy(param: Tensor, master: Tensor) -> bool:
    """Returns whether a float32 or float64 parameter has a master's values in 16 bits, as in a converted model."""
    if param.dtype not in (torch.float32, torch.float64):
        return False
    copies = split(master.to(torch.float32))[0], *(master.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return any(torch.equal(param, copy.to(param.dtype)) for copy in copies)


def _is_equal(param: Tensor, master: Tensor) -> bool:
    wide = torch.promote_types(param.dtype, master.dtype)
    return torch.equal(param.to(wide), master.to(wide))
