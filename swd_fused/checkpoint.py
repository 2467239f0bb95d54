"""State dicts: our own, and those of torch.optim.Adam and AdamW, whose keys are the same."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from swd_fused.arguments import check_group
from swd_fused.backends import Backend
from swd_fused.distributed.sharding import local_tensor, redistributed_like, sharded_like
from swd_fused.options import MASTER, Options
from swd_fused.state import MOMENTS

# How torch's Adam was implemented when it saved, and what apex, TransformerEngine and DeepSpeed keep in their groups:
# nothing that holds here.
FOREIGN_KEYS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "bias_correction", "step")


def with_own_steps(state: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """State whose step counters share no memory, so that each is saved as one number."""
    return {
        key: {**values, "step": values["step"].clone()} if "step" in values else values for key, values in state.items()
    }


def saved_by_param(groups: list[dict[str, Any]], state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """The saved state of each parameter, after checking that all of it fits."""
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"The state dict has groups of {saved_sizes} parameters, this optimizer has groups of {sizes}. "
            "Build the optimizer with the groups that it was saved with."
        )
    params = chain.from_iterable(group["params"] for group in groups)
    keys = chain.from_iterable(group["params"] for group in saved_groups)
    by_param = {param: saved_state.get(key, {}) for param, key in zip(params, keys, strict=True)}
    for group, saved_group in zip(groups, saved_groups, strict=True):
        if "step" in saved_group:  # apex counts by group
            for param in group["params"]:
                if by_param[param] and "step" not in by_param[param]:
                    by_param[param] = {**by_param[param], "step": saved_group["step"]}
    for position, (param, state) in enumerate(by_param.items()):
        if not state:
            continue
        missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in state]
        if missing:
            raise ValueError(
                f"The saved state of parameter {position} has {', '.join(map(str, state))}, but no "
                f"{', '.join(missing)}. FusedAdamS continues its own state and that of torch.optim.Adam and AdamW, and "
                "of the FusedAdam of apex, TransformerEngine and DeepSpeed."
            )
        for key in (*MOMENTS, MASTER):
            if key in state and state[key].shape != param.shape:
                raise ValueError(
                    f"The saved {key} of parameter {position} has shape {tuple(state[key].shape)}, the parameter has "
                    f"{tuple(param.shape)}. Load the state for the model that it was saved with."
                )
    return {param: state for param, state in by_param.items() if state}


def loaded_group(own: dict[str, Any], saved: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The saved hyper-parameters for the group's own parameters."""
    group = {**own, **deepcopy({key: value for key, value in saved.items() if key not in ("params", *FOREIGN_KEYS)})}
    group["betas"] = tuple(float(beta) for beta in group["betas"])
    is_foreign = "max_decay" not in saved and options.decay == "scheduled"
    if is_foreign and saved.get("weight_decay", 0) != own["weight_decay"]:
        group["weight_decay"] = own["weight_decay"]
        warnings.warn(
            f"The state dict comes from another optimizer, whose weight_decay={saved.get('weight_decay', 0)!r} is not "
            f"divided by the rms gradient: keeping weight_decay={own['weight_decay']!r}. To go on with the same decay "
            "call optimizer.match_adamw(weight_decay=...) with the value that AdamW had.",
            stacklevel=3,
        )
    check_group(group)
    return group


def loaded_state(param: Tensor, saved: Mapping[str, Any], backend: Backend, options: Options) -> dict[str, Any]:
    """A copy of what was saved, on the parameter's device, in the dtype that it was saved in or a wider one.

    torch would cast it to the parameter's dtype and go on sharing memory with the state dict's owner.
    """
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if key == "step":
            state[key] = torch.as_tensor(value, dtype=torch.float32, device=param.device).detach().reshape(()).clone()
        elif key in MOMENTS or (key == MASTER and options.needs_master(param.dtype)):
            dtype = torch.float32 if key == MASTER else options.kept_dtype(key, value.dtype, param.dtype)
            local = redistributed_like(param, value)
            state[key] = sharded_like(param, backend.new_moment(local, dtype, param.device).copy_(local))
        elif key == MASTER:
            adopt_master(local_tensor(param), redistributed_like(param, value))
        else:
            state[key] = deepcopy(value)
    return state


@torch.no_grad()
def adopt_master(param: Tensor, master: Tensor) -> None:
    """A float32 parameter that is the rounded copy of a saved master becomes the master itself, or a run with masters
    would lose by going on without. Narrower parameters have all that they can hold."""
    master = master.to(param.device)
    copies = [master.to(dtype).to(param.dtype) for dtype in (torch.bfloat16, torch.float16)]
    if param.dtype == torch.float32 and any(torch.equal(param, copy) for copy in copies):
        param.copy_(master)
