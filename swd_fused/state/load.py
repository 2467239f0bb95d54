"""Creates, completes, loads and checks the state of parameters.

Its keys are those of torch.optim.Adam and AdamW, so each can load the other's state dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.checks import is_number
from swd_fused.decay.kinds import kept_decay
from swd_fused.devices.transfer import can_be_read
from swd_fused.distributed.sharding import PLAIN_TYPES, local_tensor, redistributed_like, sharded_like
from swd_fused.options import MASTER, REMAINDER, Options, check_group
from swd_fused.state import storage
from swd_fused.state.eight_bit import SCALES, STORED_DTYPES, scales_shape
from swd_fused.state.other_libraries import as_adams
from swd_fused.state.storage import CODED, MOMENTS, STORED, convert_moments, missing_keys, new_moment, stored_dtype
from swd_fused.state.weights import convert_average, convert_master
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.backend import Backend

REQUIRED = ("step", "exp_avg", "exp_avg_sq")

# Entries that FusedAdamS's groups do not take: how torch's Adam was implemented, and the step counts of apex's groups.
FOREIGN_KEYS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "step")

# Entries that a group keeps when it loads another: a resumed run may store its moments and decay differently.
OWN_KEYS = ("params", "state_dtype", "decay")

# Entries that a group keeps as well if the saved group had no averages: a resumed run may begin to average.
AVERAGING = ("ema_decay", "ema_warmup")

# The dtypes that state may have, by whether the parameter is complex. float8 and quantized tensors are missing: their
# numbers mean nothing without scales.
DTYPES = {
    False: (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    True: (torch.complex64, torch.complex128),
}

# Entries of the state that must have one particular dtype.
FIXED_DTYPES = {**STORED_DTYPES, REMAINDER: torch.int16}

LARGE = 1 << 18  # from so many elements on, the backend allocates a loaded moment, and chooses its memory


class Initializer:
    """Makes the state that a step needs, or that was saved, for parameters of one group, dtype, device and type."""

    def __init__(self, param: Tensor, options: Options, group: Mapping[str, Any], backend: Backend) -> None:
        self._backend, self._options, self._group = backend, options, group
        self._master_key = options.master_key(param.dtype)
        has_more = group["amsgrad"] or group["ema_decay"] is not None or self._master_key is not None
        # The dtypes of both moments if the state is these two as plain tensors, else empty. Without this shortcut past
        # `_completed`, a first step of a thousand parameters took twice as long.
        self._dtypes: list[torch.dtype] = []
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
            if is_plain(owned, param) and self._is_as_wanted(owned, param.device):
                return dict(owned)
        return self._completed(param, dict(owned))

    def loaded(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of checked state, on the parameter's device, in the dtype that it was saved in or a wider one.

        torch's own loading would cast it to the parameter's dtype, and might share memory with the state dict.
        """
        device, wanted = param.device, self._group["state_dtype"]
        # The calls for shards are skipped for plain parameters: they would do nothing, in 4 ms for a thousand of them.
        is_plain_param = type(param) in PLAIN_TYPES
        state: dict[str, Any] = {}
        for key, value in (saved if is_plain_param else storage.without_cut_blocks(saved, param)).items():
            if key == "step":
                state[key] = as_step(value, device, copy=True)
            elif key not in STORED:
                state[key] = deepcopy(value)
            elif key not in (MASTER, REMAINDER) or self._master_key is not None:
                is_whole = is_plain_param and type(value) is Tensor
                local = value if is_whole else redistributed_like(param, value)
                dtype = stored_dtype(key, local.dtype, param.dtype, wanted) if key in MOMENTS else local.dtype
                if local.numel() < LARGE:
                    copied = local.to(device, dtype, copy=True)
                else:
                    copied = self._backend.new_moment(local, dtype, device).copy_(local)
                shape = tuple(value.shape) if key in STORED_DTYPES else None
                state[key] = copied if is_whole else sharded_like(param, copied, shape)
        if storage.has_moments(state) and not (self._dtypes and self._is_as_wanted(state, device)):
            convert_moments(state, param, wanted, self._backend)
        return state

    def _is_as_wanted(self, state: Mapping[str, Any], device: torch.device) -> bool:
        """Returns whether a state has both moments as plain tensors, in the wanted dtypes and on the device."""
        first, second = state.get("exp_avg"), state.get("exp_avg_sq")
        if first is None or second is None:
            return False
        return [first.dtype, second.dtype] == self._dtypes and first.device == second.device == device

    def _completed(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Adds missing entries to a state, and converts its moments to the group's `state_dtype`."""
        check_state(state, param)
        group, backend = self._group, self._backend
        if not storage.has_moments(state):
            state["step"] = self._no_steps
            for key in CODED:
                state.update(new_moment(key, param, group["state_dtype"], backend))
        state["step"] = as_step(state["step"], param.device)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            maxima = storage.decoded_moment(state, "exp_avg_sq")
            copied = backend.new_moment(local_tensor(param), maxima.dtype, param.device).copy_(maxima)
            state["max_exp_avg_sq"] = sharded_like(param, copied)
        convert_moments(state, param, group["state_dtype"], backend)
        convert_master(state, param, self._options, backend)
        convert_average(state, param, group["ema_decay"], backend)
        return state


def as_step(step: float | Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Returns a checked step count as a tensor without dimensions."""
    if not isinstance(step, Tensor):
        return torch.tensor(float(step), dtype=torch.float32, device=device)
    moved = step.to(device, torch.float32, copy=copy)
    return moved.reshape(()) if moved.dim() else moved


# --- Checking


def is_plain(state: Mapping[str, Any], param: Tensor) -> bool:
    """Returns whether a state is valid and of the most frequent form: a step count and both moments, as plain tensors.
    With `problem_in` alone, loading a thousand parameters took half as long again."""
    if type(state) is not dict or tuple(state) != REQUIRED:
        return False
    step, first, second = state.values()
    dtypes = DTYPES[param.is_complex()]
    return (
        type(step) is type(first) is type(second) is Tensor
        and first.shape == second.shape == param.shape
        and first.layout is second.layout is torch.strided
        and first.dtype in dtypes
        and second.dtype in dtypes
        and step.dtype == torch.float32
        and not step.dim()
        and _is_count(step)
    )


def _is_count(step: object) -> bool:
    """Returns whether a number, or a tensor with one element, can be a step count. Does not read it from a GPU."""
    if isinstance(step, Tensor):
        if step.numel() != 1:
            return False
        if not can_be_read(step):
            return True
        step = step.item()
    return is_number(step) and 0 <= step < 2**63 and step == int(step)


def problem_in(state: Mapping[str, Any], param: Tensor) -> str | None:
    """Returns why a step cannot continue from a state, or None. Does not look at devices."""
    missing = missing_keys(state)
    if missing and missing != list(REQUIRED):
        return f"it has {_listed(state)}, but no {_listed(missing)}"
    for name in state.keys() & STORED:
        value, shape = state[name], tuple(param.shape)
        shape = scales_shape(shape) if name in SCALES.values() else shape
        dtypes = (FIXED_DTYPES[name],) if name in FIXED_DTYPES else DTYPES[param.is_complex()]
        if not isinstance(value, Tensor):
            got = type(value).__name__
        elif value.shape != shape or value.layout is not torch.strided or value.dtype not in dtypes:
            got = f"{value.layout} tensor of {value.dtype} and shape {tuple(value.shape)}"
        else:
            continue
        return f"{name} is a {got}, wanted a dense tensor of {' or '.join(map(str, dtypes))} and shape {shape}"
    if "step" in state and not _is_count(state["step"]):
        return f"step is {state['step']!r}, wanted a whole number >= 0 or a tensor with one"
    return None


def check_state(state: Mapping[str, Any], param: Tensor) -> None:
    """Raises if a parameter's own state does not fit it, before a step writes to either."""
    local = local_tensor(param)
    parts = {key: local_tensor(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    problem = problem_in(parts, local)
    for key in parts.keys() & STORED if problem is None else ():
        if parts[key].device != local.device:
            problem = f"{key} is on {parts[key].device}, wanted it on {local.device}"
    if problem is not None:
        raise RuntimeError(
            f"FusedAdamS cannot continue the state of a parameter of shape {tuple(local.shape)}: {problem}. After "
            "moving a model let its state follow: optimizer.load_state_dict(optimizer.state_dict()). After replacing a "
            "parameter by another one delete its state: del optimizer.state[param]."
        )


# --- Loading


def check_state_dict(state_dict: object) -> None:
    """Raises if an object is no state dict of an optimizer."""
    got = type(state_dict).__name__
    if isinstance(state_dict, Mapping):
        got, state, groups = _listed(state_dict), state_dict.get("state"), state_dict.get("param_groups")
        groups = groups if isinstance(state, Mapping) and isinstance(groups, Sequence) else [None]
        if all(isinstance(group, Mapping) and "params" in group for group in groups):
            return
    raise ValueError(
        f"load_state_dict got {got}, wanted a dict with a dict as state and a list of dicts as param_groups, each with "
        "its params. Pass what optimizer.state_dict() returned; in a checkpoint it is one of the entries."
    )


def saved_by_param(groups: list[dict[str, Any]], state_dict: Mapping[str, Any]) -> dict[Tensor, Mapping[str, Any]]:
    """Checks that the saved state fits, and returns that of each parameter that has any."""
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"The state dict has groups of {saved_sizes} parameters, this optimizer has groups of {sizes}. "
            "Build the optimizer with the groups that it was saved with."
        )
    by_param: dict[Tensor, Mapping[str, Any]] = {}
    for group, saved_group in zip(groups, saved_groups, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            state = saved_state.get(key, {})
            if not is_plain(state, param):
                state = _checked(state, param, key, saved_group)
            if state:
                by_param[param] = state
    return by_param


def _checked(state: Any, param: Tensor, key: object, saved_group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checks saved state, FusedAdamS's or another library's, and returns it under FusedAdamS's names."""
    problem: str | None = f"it is a {type(state).__name__}, wanted a dict"
    if isinstance(state, Mapping):
        state = as_adams(state)
        if "step" in saved_group and state and "step" not in state:  # apex counts by group
            state = {**state, "step": saved_group["step"]}
        problem = problem_in(state, param)
        # Without moments, tensors are another algorithm's state. Other entries are the user's own notes.
        is_fresh = problem is None and not storage.has_moments(state)
        if is_fresh and any(isinstance(value, Tensor) for value in state.values()):
            problem = f"it has {_listed(state)}, but no {_listed(REQUIRED)}"
    if problem is not None:
        raise ValueError(
            f"The saved state of parameter {key} cannot be continued: {problem}. Load it for the model that it was "
            "saved with. It may be FusedAdamS's own, or that of an Adam or AdamW that docs/migrating.md lists."
        )
    return state  # type: ignore[no-any-return]


def other_entries(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the entries of the saved state that belong to no parameter. They stay as they are, as in torch."""
    keys = set(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    return {key: value for key, value in state_dict["state"].items() if key not in keys}


def loaded_group(own: dict[str, Any], saved: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Returns a group with its own parameters and the saved hyper-parameters. Warns if the decay differs."""
    left = (*OWN_KEYS, *FOREIGN_KEYS, *(AVERAGING if saved.get("ema_decay") is None else ()))
    taken = {key: value for key, value in saved.items() if key not in left}
    kept, warning = kept_decay(own, saved, options.decay)
    group = {**own, **deepcopy(taken), **kept}
    if isinstance(group["betas"], list):  # JSON and YAML have no tuples
        group["betas"] = tuple(group["betas"])
    if warning is not None:
        warn_user(warning)
    check_group(group, options.decay)
    return group


def _listed(keys: Iterable[object]) -> str:
    return ", ".join(map(str, keys)) or "nothing"
