"""The form in which the state stores each operand of a step: the columns that kernels take, and the forms of moments.

`StateColumns` is the only list of operands: loading, and the addresses that Triton's kernels read, follow from it. The
C++ operators take the same lists in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.distributed.sharding import PLAIN_TYPES, is_dtensor, local_tensor, sharded_like
from swd_fused.options import MASTER, REMAINDER, Options, StateDtype
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODE_DTYPES, CODES, SCALES, scales_shape
from swd_fused.state.weights import AVERAGE

if TYPE_CHECKING:
    from swd_fused.core.backend import Backend


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


# --- Moments: tensors of some dtype, or 8-bit codes with scales

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
