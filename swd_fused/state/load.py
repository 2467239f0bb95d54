"""The state of one parameter: creating, loading and converting it, and checking state dicts.

Its keys are those of torch.optim.Adam and AdamW, so state dicts move between them and FusedAdamS.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.checks import is_number
from swd_fused.decay.loading import kept_decay
from swd_fused.devices.transfer import is_fake
from swd_fused.distributed.sharding import PLAIN_TYPES, local_tensor, redistributed_like, sharded_like
from swd_fused.options import MASTER, REMAINDER, Options, check_group, check_tensor_lr
from swd_fused.state import moments
from swd_fused.state.averages import AVERAGE, average_dtype, convert_average
from swd_fused.state.eight_bit import SCALES, STORED_DTYPES, scales_shape
from swd_fused.state.masters import convert_master
from swd_fused.state.moments import CODED, MOMENTS, convert_moments, missing_keys, new_moment, stored_dtype, tensors_of
from swd_fused.state.operands import KEYS, SCALE_COLUMNS, STORED, StateColumns, as_real
from swd_fused.state.other_libraries import as_adams
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.backend import Backend

REQUIRED = ("step", "exp_avg", "exp_avg_sq")

# How torch's Adam was implemented when it saved, and the step counts that apex keeps in groups: not for our groups.
FOREIGN_KEYS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "step")

# Entries that a group keeps when it loads another: a resumed run may store its moments otherwise, and decay otherwise.
OWN_KEYS = ("params", "state_dtype", "decay")

# And these, if the saved group had no averages: then a resumed run may begin to average.
AVERAGING = ("ema_decay", "ema_warmup")

# Those of saved state, by whether the parameter is complex. float8 and quantized numbers are not what they stand for
# without their scales.
SAVED_DTYPES = {
    False: (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    True: (torch.complex64, torch.complex128),
}

# These have one dtype each.
FIXED_DTYPES = {**STORED_DTYPES, REMAINDER: torch.int16}

NOT_NEGATIVE = (*MOMENTS[1:], *SCALES.values())

LARGE = 1 << 18  # elements, from which on the backend says how a moment lies in memory

SHAPE, DEVICE, DTYPE, LAYOUT = map(attrgetter, ("shape", "device", "dtype", "layout"))


class Initializer:
    """Gives parameters of one group, dtype, device and type the state that a step needs, or that was saved.

    Most have none yet, or all of it as plain tensors: where these went through `initialized` and `_loaded` too, a first
    step of a thousand parameters, or loading their state, took twice as long.
    """

    def __init__(self, param: Tensor, options: Options, group: Mapping[str, Any], backend: Backend) -> None:
        self._backend = backend
        self._options, self._group = options, group
        has_more = group["amsgrad"] or group["ema_decay"] is not None or options.master_key(param.dtype) is not None
        self._dtypes: list[torch.dtype] = []  # of both moments, where they are plain tensors, and all there is
        if type(param) in PLAIN_TYPES and not (has_more or group["state_dtype"] == "8bit" or param.is_complex()):
            self._dtypes = [stored_dtype(key, param.dtype, param.dtype, group["state_dtype"]) for key in CODED]
        self._no_steps = torch.zeros((), dtype=torch.float32, device=param.device)  # buckets copy it

    def state_for(self, param: Tensor, owned: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a parameter's own state, completed and converted."""
        if self._dtypes:
            if not owned:
                new, device, (first, second) = self._backend.new_moment, self._no_steps.device, self._dtypes
                return {
                    "step": self._no_steps,
                    "exp_avg": new(param, first, device),
                    "exp_avg_sq": new(param, second, device),
                }
            if self._is_stored_so(owned, param) and owned["step"].dtype == torch.float32:
                return {**owned, "step": _checked_step(owned["step"], param)}
        return initialized(dict(owned), param, self._options, self._group, self._backend)

    def loaded(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of checked state, on the parameter's device, in the dtype that it was saved in or a wider one.

        torch would cast it to the parameter's dtype and go on sharing memory with the state dict's owner.
        """
        if not self._is_stored_so(saved, param):
            return _loaded(param, saved, self._backend, self._options, self._group)
        step, *both = saved.values()
        device = self._no_steps.device
        first, second = (
            moment.to(device, copy=True)
            if moment.numel() < LARGE
            else self._backend.new_moment(moment, moment.dtype, device).copy_(moment)
            for moment in both
        )
        return {"step": _copied_step(step, device), "exp_avg": first, "exp_avg_sq": second}

    def _is_stored_so(self, state: Mapping[str, Any], param: Tensor) -> bool:
        """Returns whether a state is plain, and has its moments in the dtypes that are wanted."""
        return bool(self._dtypes) and is_plain(state, param) and self._dtypes == [state[key].dtype for key in CODED]


def is_plain(state: Mapping[str, Any], param: Tensor) -> bool:
    """Returns whether a state is what most have: a step count, and both moments as tensors of the parameter's shape."""
    if tuple(state) != REQUIRED:
        return False
    step, first, second = state.values()
    return type(step) is type(first) is type(second) is Tensor and first.shape == second.shape == param.shape


def initialized(
    state: dict[str, Any], param: Tensor, options: Options, group: Mapping[str, Any], backend: Backend
) -> dict[str, Any]:
    """Adds what a step needs and is missing, and stores moments as the group has it."""
    _check_entries(state, param)
    missing = missing_keys(state)
    if missing == list(REQUIRED):
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for key in CODED:
            state.update(new_moment(key, param, group["state_dtype"], backend))
    elif missing:
        raise _unusable(f"state with {_listed(state)}, but without {_listed(missing)}", "all of it or none", param)
    if group["amsgrad"] and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = _as_maxima(param, state, backend)
    convert_moments(state, param, group["state_dtype"], backend)
    convert_master(state, param, options, backend)
    convert_average(state, param, group["ema_decay"], backend)
    return state


def _check_entries(state: dict[str, Any], param: Tensor) -> None:
    """Refuses what a user has put into the state, unless a step can go on from it, and makes step counts tensors."""
    for key in state.keys() & STORED:
        if not isinstance(state[key], Tensor):
            raise _unusable(f"{key} of type {type(state[key]).__name__}", "a tensor", param)
        if key in FIXED_DTYPES and state[key].dtype != FIXED_DTYPES[key]:
            raise _unusable(f"{key} of {state[key].dtype}", str(FIXED_DTYPES[key]), param)
    if "step" in state:
        state["step"] = _checked_step(state["step"], param)


def _unusable(got: str, wanted: str, param: Tensor) -> RuntimeError:
    return RuntimeError(
        f"FusedAdamS has {got}, wanted {wanted}, for a parameter of shape {tuple(param.shape)}. Load a state dict, or "
        "start it afresh: del optimizer.state[param]."
    )


def _checked_step(step: object, param: Tensor) -> Tensor:
    """Returns a step count as a tensor. One on a GPU is not waited for."""
    if isinstance(step, Tensor):
        if step.numel() == 1 and (not step.is_cpu or is_fake(step) or _is_count(step)):
            return step.reshape(()) if step.dim() else step
    elif _is_count(step):
        return torch.tensor(float(step), dtype=torch.float32, device=param.device)  # type: ignore[arg-type]
    raise _unusable(f"step={step!r}", "a whole number >= 0 or a tensor with one", param)


def _is_count(step: object) -> bool:
    """Reads a tensor, which may wait for a device."""
    if isinstance(step, Tensor):
        step = None if step.numel() != 1 or step.is_complex() else step.item()
    return is_number(step) and 0 <= step < 2**63 and step == int(step)


def _as_maxima(param: Tensor, state: Mapping[str, Any], backend: Backend) -> Tensor:
    """Returns the second moments as the first maxima of amsgrad."""
    if not moments.is_coded(state):
        return state["exp_avg_sq"].clone()  # type: ignore[no-any-return]
    values = moments.decoded_moment(state, "exp_avg_sq")
    return sharded_like(param, backend.new_moment(local_tensor(param), values.dtype, param.device).copy_(values))


def check_stored(params: Sequence[Tensor], columns: StateColumns, coded: Sequence[int]) -> None:
    """Refuses state that does not fit its parameter, before a step writes to either. `coded` are the places of
    parameters whose moments are 8-bit codes."""
    shapes, devices = list(map(SHAPE, params)), list(map(DEVICE, params))
    for name, column in columns._asdict().items():
        if name in SCALE_COLUMNS:
            for index in coded:
                check_fits(params[index], column[index], scales_shape(params[index].shape))
        elif column and (list(map(SHAPE, column)) != shapes or list(map(DEVICE, column)) != devices):
            for param, tensor in zip(params, column, strict=True):
                check_fits(param, tensor, tuple(param.shape))


def check_fits(param: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuses state of another shape, or on another device."""
    if tensor.shape != shape or tensor.device != param.device:
        raise RuntimeError(
            f"FusedAdamS has state of shape {tuple(tensor.shape)} on {tensor.device} for a parameter that now has "
            f"shape {tuple(param.shape)} on {param.device}, wanted {shape} there. After moving a model let its state "
            "follow: optimizer.load_state_dict(optimizer.state_dict()). After replacing a parameter by another one "
            "delete its state: del optimizer.state[param]."
        )


# --- Loading


def check_state_dict(state_dict: object) -> None:
    """Refuses what is no state dict of an optimizer."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"load_state_dict got a {type(state_dict).__name__}, wanted what state_dict() returns.")
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"load_state_dict got a dict with {_listed(state_dict)}, but without {_listed(missing)}. Pass what "
            "optimizer.state_dict() returned; in a training checkpoint it is one of the entries."
        )
    if not isinstance(state_dict["state"], Mapping):
        raise ValueError(f"load_state_dict got a {type(state_dict['state']).__name__} as state, wanted a dict.")
    groups = state_dict["param_groups"]
    if not isinstance(groups, Sequence) or not all(isinstance(each, Mapping) and "params" in each for each in groups):
        raise ValueError('load_state_dict got param_groups that are not a list of dicts with a key "params".')
    for params in (group["params"] for group in groups):
        if not isinstance(params, Sequence) or not all(isinstance(key, Hashable) for key in params):
            raise ValueError(f"load_state_dict got params={params!r}, wanted a list of the parameters' numbers.")


def saved_by_param(groups: list[dict[str, Any]], state_dict: Mapping[str, Any]) -> dict[Tensor, Mapping[str, Any]]:
    """Returns the saved state of each parameter that has any, after checking that all of it fits."""
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"The state dict has groups of {saved_sizes} parameters, this optimizer has groups of {sizes}. "
            "Build the optimizer with the groups that it was saved with."
        )
    by_param: dict[Tensor, Mapping[str, Any]] = {}
    checked: list[tuple[object, Tensor, object]] = []  # one by one
    plain: list[tuple[Mapping[str, Any], Tensor, object]] = []  # all at once
    for group, saved_group in zip(groups, saved_groups, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            state = saved_state.get(key, {})
            if isinstance(state, Mapping):
                if is_plain(state, param):
                    plain.append((state, param, key))
                    by_param[param] = state
                    continue
                state = as_adams(state)
                if "step" in saved_group and state and "step" not in state:  # apex counts by group
                    state = {**state, "step": saved_group["step"]}
            if state:
                checked.append((state, param, key))
                by_param[param] = state
    if plain and not _are_sound([state for state, _, _ in plain]):
        checked += plain
    for entry in checked:
        _check_saved(*entry)
    return by_param


def _are_sound(states: list[Mapping[str, Any]]) -> bool:
    """Returns whether a step can go on from plain states, as far as that can be told of all at once: a thousand of them
    took 6 ms one by one."""
    steps, firsts, seconds = zip(*(state.values() for state in states), strict=True)
    devices, shapes = set(map(DEVICE, (*steps, *firsts, *seconds))), set(map(SHAPE, steps))
    dtypes = set(map(DTYPE, seconds))
    are_alike = len(devices) == len(shapes) == len(dtypes) == 1 and set(map(DTYPE, steps)) == {torch.float32}
    are_known = dtypes.union(map(DTYPE, firsts)) <= set(SAVED_DTYPES[False]) and not firsts[0].is_meta
    if not (are_alike and are_known and set(map(LAYOUT, (*firsts, *seconds))) == {torch.strided}):
        return False
    counts = torch.stack(steps)
    are_counts = (counts >= 0) & (counts < 2**63) & (counts == counts.floor())
    least = torch.stack([second.min() for second in seconds if second.numel()] or [seconds[0].new_zeros(())])
    return counts.numel() == len(steps) and bool(are_counts.all() & ~(least < 0).any())


def _check_saved(state: object, param: Tensor, key: object) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"The saved state of parameter {key} is a {type(state).__name__}, wanted a dict.")
    missing = missing_keys(state)
    # Notes of the user's own, of a parameter that has taken no step, are not another algorithm's state.
    if missing and (len(missing) < len(REQUIRED) or any(isinstance(value, Tensor) for value in state.values())):
        raise ValueError(
            f"The saved state of parameter {key} has {_listed(state)}, but no {_listed(missing)}. FusedAdamS continues "
            "its own state, that of torch's, bitsandbytes' and torchao's Adam and AdamW, and that of the FusedAdam of "
            "apex, TransformerEngine and DeepSpeed."
        )
    own_shape = tuple(param.shape)
    shapes = {name: own_shape for name in (MASTER, REMAINDER, AVERAGE) if name in state}
    for moment in MOMENTS:
        shapes.update(tensors_of(moment, own_shape, state))
    for name, shape in shapes.items():
        saved = f"The saved {name} of parameter {key}"
        if not isinstance(state[name], Tensor):
            raise ValueError(f"{saved} is a {type(state[name]).__name__}, wanted a tensor of shape {shape}.")
        if state[name].shape != shape:
            raise ValueError(
                f"{saved} has shape {tuple(state[name].shape)}, the parameter has {own_shape}, wanted {shape}. Load "
                "the state for the model that it was saved with."
            )
        _check_saved_tensor(name, local_tensor(state[name]), local_tensor(param), saved)
    step = state.get("step", 0)
    is_traced = isinstance(step, Tensor) and is_fake(step)
    if not (is_fake(local_tensor(param)) if is_traced else _is_count(step)):
        raise ValueError(
            f"The saved step of parameter {key} is {step!r}, wanted a whole number >= 0 or a tensor with one: the "
            "number of steps that were taken."
        )


def _check_saved_tensor(name: str, tensor: Tensor, param: Tensor, saved: str) -> None:
    wanted = (FIXED_DTYPES[name],) if name in FIXED_DTYPES else SAVED_DTYPES[param.is_complex()]
    if tensor.layout != torch.strided or (is_fake(tensor) and not is_fake(param)) or tensor.dtype not in wanted:
        raise ValueError(
            f"{saved} is a tensor of {tensor.dtype} and {tensor.layout} on {tensor.device}, wanted a dense one with "
            f"memory, of {' or '.join(map(str, wanted))}. Convert it before loading, with its scales if it has any."
        )
    if name in NOT_NEGATIVE and not is_fake(tensor) and tensor.numel() and bool(as_real(tensor).min() < 0):
        raise ValueError(f"{saved} has negative values: it is damaged.")


def other_entries(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the entries of the saved state that belong to no parameter. They are kept as they are, as torch does."""
    keys = set(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    return {key: value for key, value in state_dict["state"].items() if key not in keys}


def loaded_group(own: dict[str, Any], saved: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Returns a group with its own parameters and the saved hyper-parameters."""
    left = (*OWN_KEYS, *FOREIGN_KEYS, *(AVERAGING if saved.get("ema_decay") is None else ()))
    taken = {key: value for key, value in saved.items() if key not in left}
    kept, warning = kept_decay(own, saved, options.decay)
    group = {**own, **deepcopy(taken), **kept}
    if isinstance(group["betas"], list):  # as JSON and YAML have it
        group["betas"] = tuple(group["betas"])
    if warning is not None:
        warn_user(warning)
    check_group(group, options.decay)
    if isinstance(group["lr"], Tensor) and not is_fake(group["lr"]):
        check_tensor_lr(group["lr"])
    return group


def _copied_step(step: Any, device: torch.device) -> Tensor:
    if not isinstance(step, Tensor):
        return torch.tensor(step, dtype=torch.float32, device=device)
    copied = step.to(device, torch.float32, copy=True)
    return copied.reshape(()) if copied.dim() else copied


def _loaded(
    param: Tensor, saved: Mapping[str, Any], backend: Backend, options: Options, group: Mapping[str, Any]
) -> dict[str, Any]:
    saved = moments.without_cut_blocks(saved, param)
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if key == "step":
            state[key] = _copied_step(value, param.device)
        elif key in STORED and (key not in KEYS["masters"] or options.master_key(param.dtype) is not None):
            dtype = {MASTER: torch.float32, AVERAGE: average_dtype(param.dtype)}.get(key, value.dtype)
            if key in MOMENTS:
                dtype = stored_dtype(key, dtype, param.dtype, group["state_dtype"])
            local = redistributed_like(param, value)
            shape = tuple(value.shape) if key in STORED_DTYPES else None
            state[key] = sharded_like(param, backend.new_moment(local, dtype, param.device).copy_(local), shape)
        elif key not in STORED:
            state[key] = deepcopy(value)
    if moments.has_moments(state):
        convert_moments(state, param, group["state_dtype"], backend)
    return state


def _listed(keys: Iterable[object]) -> str:
    return ", ".join(map(str, keys)) or "nothing"
