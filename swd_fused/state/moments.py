"""Storage of a parameter's moments: as a tensor of some dtype, or as 8-bit codes with scales."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.distributed.sharding import is_dtensor, local_tensor, sharded_like
from swd_fused.options import StateDtype
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODE_DTYPES, CODES, SCALES, scales_shape

if TYPE_CHECKING:
    from swd_fused.core.backend import Backend

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
CODED = ("exp_avg", "exp_avg_sq")  # may be 8-bit codes; stochastic rounding would make the third one's maxima grow


@cache
def stored_dtype(key: str, dtype: torch.dtype, param_dtype: torch.dtype, state_dtype: StateDtype) -> torch.dtype:
    """Returns the dtype to store a moment in that now has `dtype`: never a narrower one, except on request.

    Only the first moment may have 16 bits. A bfloat16 second moment would stall, since a step changes a thousandth of
    it, which is below its resolution. Moments of complex and float64 parameters keep the parameter's precision.
    """
    is_wide = param_dtype.is_complex or param_dtype == torch.float64
    if key == "exp_avg" and isinstance(state_dtype, torch.dtype) and not is_wide:
        return state_dtype
    return torch.promote_types(torch.promote_types(dtype, torch.float32), param_dtype)


def is_coded(state: Mapping[str, Any], key: str = "exp_avg_sq") -> bool:
    return key in CODES and CODES[key] in state


def has_moments(state: Mapping[str, Any]) -> bool:
    return "exp_avg_sq" in state or is_coded(state)


def missing_keys(state: Mapping[str, Any]) -> list[str]:
    """Returns the keys that a step needs and the state lacks. Codes without scales lack the scales."""
    missing = [] if "step" in state else ["step"]
    for key in CODED:
        if CODES[key] in state or SCALES[key] in state:
            missing += [name for name in (CODES[key], SCALES[key]) if name not in state]
        elif key not in state:
            missing.append(key)
    return missing


def decoded_moment(state: Mapping[str, Any], key: str) -> Tensor:
    """Returns this rank's part of a moment, decoded if it is stored as codes."""
    if is_coded(state, key):
        return eight_bit.decoded(key, *(local_tensor(state[name]) for name in (CODES[key], SCALES[key])))
    return local_tensor(state[key])


def without_cut_blocks(state: Mapping[str, Any], param: Tensor) -> Mapping[str, Any]:
    """Decodes the moments of a DTensor whose new shards would cut blocks: scales could not follow their codes."""
    if not is_dtensor(param) or eight_bit.fits(param):
        return state
    result = dict(state)
    for key in CODED:
        if is_coded(state, key):
            codes = result.pop(CODES[key])
            del result[SCALES[key]]
            result[key] = sharded_like(codes, decoded_moment(state, key))
    return result


def new_moment(key: str, param: Tensor, state_dtype: StateDtype, backend: Backend) -> dict[str, Tensor]:
    """Returns the entries of the state for a moment of zeros."""
    if state_dtype == "8bit" and eight_bit.fits(param):
        return _as_codes(key, param, None, backend)
    dtype = stored_dtype(key, param.dtype, param.dtype, state_dtype)
    return {key: sharded_like(param, backend.new_moment(local_tensor(param), dtype, param.device))}


def convert_moments(state: dict[str, Any], param: Tensor, state_dtype: StateDtype, backend: Backend) -> None:
    """Converts moments to their wanted form. Moments that have it already stay the very same tensors."""
    is_wanted_coded = state_dtype == "8bit" and eight_bit.fits(param)
    for key in MOMENTS:
        if is_coded(state, key) and not is_wanted_coded:
            dtype = stored_dtype(key, torch.float32, param.dtype, state_dtype)
            moment = backend.new_moment(local_tensor(param), dtype, param.device)
            codes, scales = (local_tensor(state.pop(name)) for name in (CODES[key], SCALES[key]))
            for piece, blocks in eight_bit.pieces(codes.shape):
                moment[piece].copy_(eight_bit.decoded(key, codes[piece], scales[blocks]))
            state[key] = sharded_like(param, moment)
        elif is_coded(state, key):
            state.pop(key, None)  # only the codes are valid, and nobody may take these numbers for the moment
            for name in (CODES[key], SCALES[key]):
                if not local_tensor(state[name]).is_contiguous():
                    state[name] = state[name].contiguous()
        elif key in state and key in CODED and is_wanted_coded:
            state.update(_as_codes(key, param, local_tensor(state.pop(key)), backend))
        elif key in state:
            state[key] = state[key].to(stored_dtype(key, state[key].dtype, param.dtype, state_dtype))


def _as_codes(key: str, param: Tensor, values: Tensor | None, backend: Backend) -> dict[str, Tensor]:
    """Returns a moment as codes and scales, rounded to nearest: a single conversion leaves no bias."""
    shape = tuple(local_tensor(param).shape)
    like = torch.empty(shape, device="meta")  # row-major, whatever the parameter's strides are
    codes = backend.new_moment(like, CODE_DTYPES[key], param.device)
    scales = torch.zeros(scales_shape(shape), dtype=torch.float32, device=param.device)
    if values is not None:
        for piece, blocks in eight_bit.pieces(shape):
            own = codes[piece], scales[blocks]
            for tensor, value in zip(own, eight_bit.encoded(key, values[piece].to(torch.float32)), strict=True):
                tensor.copy_(value)
    return {
        CODES[key]: sharded_like(param, codes, tuple(param.shape)),
        SCALES[key]: sharded_like(param, scales, scales_shape(param.shape)),
    }
