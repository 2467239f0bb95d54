"""State dicts and pickles of an optimizer: their entries, and how they are loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from swd_fused import backends
from swd_fused.core.step import Stepper
from swd_fused.metrics import ClippedSteps
from swd_fused.options import Options
from swd_fused.state.load import (
    Initializer,
    check_state_dict,
    loaded_group,
    other_entries,
    saved_by_param,
)
from swd_fused.state.weights import warn_of_dropped_masters


def without_process_groups(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict without process groups, which cannot be saved: they live in this process only."""
    groups = [
        {key: value for key, value in group.items() if key != "process_group"} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def after_hooks(state_dict: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Returns a copy of a state dict after the optimizer's hooks have run, checked before and after them."""
    check_state_dict(state_dict)
    state_dict = state_dict.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    check_state_dict(state_dict)
    return state_dict


def loaded(state_dict: Mapping[str, Any], own_groups: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    """Returns the groups and the state that an optimizer takes over from a state dict."""
    saved = saved_by_param(own_groups, state_dict)
    warn_of_dropped_masters(saved, options)
    groups = []
    for own, saved_group in zip(own_groups, state_dict["param_groups"], strict=True):
        groups.append(loaded_group(own, saved_group, options))
    state: defaultdict[Any, Any] = defaultdict(dict, other_entries(state_dict))
    with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be stepped later
        for group in groups:
            initializers: dict[tuple[object, ...], Initializer] = {}
            for param in filter(saved.__contains__, group["params"]):
                kind = param.dtype, param.device, type(param)
                initializer = initializers.get(kind)
                if initializer is None:
                    initializer = Initializer(param, options, group, backends.choose(param, options))
                    initializers[kind] = initializer
                state[param] = initializer.loaded(param, saved[param])
    return {"state": state, "param_groups": groups}


def pickled(stepper: Stepper, state: Mapping[Any, Any], clipped: ClippedSteps) -> dict[str, Any]:
    """Returns the entries that the steps so far add to a pickle.

    The step counters of a bucket are views of one tensor. They are copied because pickle, unlike torch.save and
    deepcopy, would write that whole tensor for each of them.
    """
    own: defaultdict[Any, Any] = defaultdict(dict, state)
    for key, values in state.items():
        if isinstance(key, Tensor) and isinstance(values.get("step"), Tensor):
            own[key] = {**values, "step": values["step"].clone()}
    kept = stepper.options, stepper.sharded_over, clipped, stepper.skipped_steps, stepper.last
    return {"state": own, "_beside_state": kept}
