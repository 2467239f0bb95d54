"""Checks parameter groups when they are new, and all of them together when an optimizer is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swd_fused import backends
from swd_fused.checks import check_params
from swd_fused.decay.kinds import WEIGHT_DECAYS, Decay
from swd_fused.decay.observers import CALIBRATION_STEPS, calibration_of
from swd_fused.distributed.refusals import refuse_tensor_alone
from swd_fused.distributed.sharding import ShardedOver
from swd_fused.options import GROUP_DEFAULTS, Options, check_group
from swd_fused.user_warning import warn_user

Group = Mapping[str, Any]

# Below this lr, bfloat16 weights of 0.02 and more do not change: a weight resolves 1/256 of itself, and a step moves it
# by about lr. At 1e-5 only 3% of a small language model's weights moved.
SMALL_LR_FOR_BFLOAT16 = 1e-4


def checked_defaults(arguments: Mapping[str, Any], decay: Decay) -> dict[str, Any]:
    """Returns the checked defaults of the options that a group may set."""
    defaults = {name: arguments.get(name, default) for name, default in GROUP_DEFAULTS.items()}
    defaults["decay"] = decay
    if defaults["weight_decay"] is None:
        defaults["weight_decay"] = WEIGHT_DECAYS[decay]
    if defaults["calibration_steps"] is None:
        defaults["calibration_steps"] = 0 if defaults["adamw_weight_decay"] is None else CALIBRATION_STEPS
    check_group(defaults, decay)
    return defaults


def new_group(group: dict[str, Any], defaults: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Checks a group, and returns it in the form in which torch adds it."""
    whole = {**defaults, **group}
    check_group(whole, defaults["decay"])
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    elif not isinstance(params, set):  # torch refuses sets, which have no order
        params = list(params)
    named_or_not = [param[1] if isinstance(param, tuple) else param for param in params]
    tensors = [param for param in named_or_not if isinstance(param, Tensor)]  # torch refuses anything else
    check_params(tensors, "one group")
    for param in tensors:
        backends.choose(param, options)  # raises if the backend cannot step it
    group = {**group, "params": params, **calibration_of(whole)}
    group.pop("decoupled_weight_decay", None)  # in a state dict it would mean that torch's AdamW saved it
    if "process_group" in group:
        group["process_group"] = ShardedOver.checked(group["process_group"])
    return group


def check_all(options: Options, defaults: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Refuses an optimizer per tensor, and AdamW's decay if no group decays. Warns if lr is too small for bfloat16."""
    if options.uses_sums:
        refuse_tensor_alone(options.shared_sum)
    if defaults["adamw_weight_decay"] and not any(group["adamw_weight_decay"] for group in groups):
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={defaults['adamw_weight_decay']!r}, but all parameter groups have "
            "weight_decay=0. Leave weight_decay out of the groups that should decay (in Hugging Face's "
            "TrainingArguments give it the same value as adamw_weight_decay)."
        )
    rounded = [group for group in groups if any(param.dtype == torch.bfloat16 for param in group["params"])]
    lrs = [group["lr"] for group in rounded if not isinstance(group["lr"], Tensor)]
    small = [lr for lr in lrs if 0 < lr < SMALL_LR_FOR_BFLOAT16]
    if small and not (options.master_weights or options.stochastic_rounding):
        warn_user(
            f"FusedAdamS got bfloat16 parameters with lr={small[0]:g}: most updates are smaller than what bfloat16 "
            "resolves and will be lost. Use master_weights=True, which keeps float32 copies, or "
            "stochastic_rounding=True, which takes no memory.",
        )
