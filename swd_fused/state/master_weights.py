"""Master weights in the state: float32 copies of float16 parameters, and the two bytes that bfloat16 ones lack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.distributed.sharding import local_tensor, redistributed_like, sharded_like
from swd_fused.options import MASTER, REMAINDER, Options
from swd_fused.state.masters import joined, remainder_of, split
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.backend import Backend


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


def with_remainder(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns saved state in which a remainder has its own name: TransformerEngine saves it as a master in int16."""
    if isinstance(state.get(MASTER), Tensor) and state[MASTER].dtype == torch.int16:
        return {**{key: value for key, value in state.items() if key != MASTER}, REMAINDER: state[MASTER]}
    return state


def check_remainder(state: Mapping[str, Any], param: Tensor, error: type[Exception]) -> None:
    """Refuses a remainder that is none, or that belongs to no bfloat16 parameter."""
    if REMAINDER not in state:
        return
    if state[REMAINDER].dtype != torch.int16:
        raise error(
            f"FusedAdamS got {REMAINDER} of {state[REMAINDER].dtype}, wanted torch.int16, for a parameter of shape "
            f"{tuple(param.shape)}: it is damaged, or was converted. Save and load state as it is."
        )


# --- Masters that are loaded without `master_weights=True`


def adopt_masters(saved: Mapping[Tensor, Mapping[str, Any]], options: Options) -> None:
    """Copies saved masters into parameters that can hold them, and warns, once, of those that are dropped."""
    pairs = [
        (local_tensor(param), _saved_master(param, state))
        for param, state in saved.items()
        if (MASTER in state or REMAINDER in state) and options.master_key(param.dtype) is None
    ]
    adopted = [(param, master) for param, master in pairs if _is_rounded_copy(param, master)]
    dropped = Counter(
        param.dtype for param, master in pairs if not (_is_rounded_copy(param, master) or _is_equal(param, master))
    )
    if dropped:
        counts = ", ".join(f"{count} of {dtype}" for dtype, count in dropped.items())
        warn_user(
            f"The state dict has float32 master weights, under {MASTER!r} or {REMAINDER!r}, for parameters that do not "
            f"hold their values ({counts}): they are dropped, and training goes on from the parameters as they are. To "
            "keep the masters of 16-bit parameters build the optimizer with master_weights=True; to go on in float32 "
            "load the model's state before the optimizer's.",
        )
    with torch.no_grad():
        for param, master in adopted:
            param.copy_(master)


def refuse_lone_remainders(saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Raises if a remainder belongs to a parameter that is not, and was not, bfloat16."""
    for param, state in saved.items():
        if REMAINDER not in state or param.dtype == torch.bfloat16:
            continue
        local = local_tensor(param).detach()
        if not torch.equal(local.to(torch.bfloat16).to(local.dtype), local):
            raise ValueError(
                f"The state dict has {REMAINDER} for a parameter of shape {tuple(param.shape)}, {param.dtype}, wanted "
                "one of torch.bfloat16, or one that has such values: the remainder is what its master has beyond "
                "them. Load the model's state first, or save optimizer.master_param(param) in place of the parameter."
            )


def _saved_master(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    if MASTER in state:
        return redistributed_like(param, state[MASTER]).to(param.device)
    remainder = redistributed_like(param, state[REMAINDER]).to(param.device)
    return joined(local_tensor(param).detach().to(torch.bfloat16), remainder)


def _is_rounded_copy(param: Tensor, master: Tensor) -> bool:
    """Returns whether a float32 or float64 parameter has a master's values in 16 bits, as in a converted model."""
    if param.dtype not in (torch.float32, torch.float64):
        return False
    copies = split(master.to(torch.float32))[0], *(master.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return any(torch.equal(param, copy.to(param.dtype)) for copy in copies)


def _is_equal(param: Tensor, master: Tensor) -> bool:
    wide = torch.promote_types(param.dtype, master.dtype)
    return torch.equal(param.to(wide), master.to(wide))
