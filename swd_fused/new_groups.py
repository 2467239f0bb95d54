"""Checks parameter groups when they are new: together with the options, and with the groups that are there already."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from swd_fused import backends
from swd_fused.averages import check_use_of_warmup
from swd_fused.core.tensor_checks import check_params
from swd_fused.decay import calibration, follow_lr
from swd_fused.decay.kinds import SO_FAR, WEIGHT_DECAYS, Decay
from swd_fused.distributed.refusals import refuse_tensor_alone
from swd_fused.distributed.sharding import ShardedOver, local_tensor
from swd_fused.options import GROUP_DEFAULTS, Options, check_new_group
from swd_fused.state import eight_bit
from swd_fused.user_warning import warn_user

Group = Mapping[str, Any]

# Below this a bfloat16 weight of 0.02 and more stays where it is: it resolves 1/256 of itself, and a step moves it by
# about lr. At 1e-5 it was 3% of a small language model's weights that moved.
SMALL_LR_FOR_BFLOAT16 = 1e-4

# The share of a weight that a step may remove without a warning: AdamW's decay of 0.1 at a learning rate of 0.1.
LARGE_SHARE = 1e-2


def listed(params: ParamsT) -> ParamsT:
    """Returns parameters or groups that can be gone through twice, after checking that there are any."""
    if not isinstance(params, Iterable) or isinstance(params, (Tensor, set)):  # torch explains what is wrong there
        return params
    params = list(params)  # type: ignore[assignment]
    if not params:
        raise ValueError(
            "FusedAdamS got no parameters, wanted at least one. Pass model.parameters(); a generator that was used "
            "before is empty."
        )
    return params


def checked_defaults(arguments: Mapping[str, Any], decay: Decay) -> dict[str, Any]:
    """Returns what groups have that do not say otherwise."""
    given = {name: arguments.get(name, default) for name, default in GROUP_DEFAULTS.items()}
    if given["weight_decay"] is None:
        given["weight_decay"] = WEIGHT_DECAYS[decay]
    entries = calibration.checked_calibration(given["adamw_weight_decay"], given["calibration_steps"], decay)
    defaults = {**given, **entries, "decay": decay}
    check_new_group({}, defaults)
    return defaults


def new_group(
    group: dict[str, Any], defaults: Mapping[str, Any], options: Options, others: Sequence[Tensor]
) -> dict[str, Any]:
    """Returns a group as torch is to add it, after checking it. `others` are the parameters of the other groups."""
    check_new_group(group, defaults)
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    elif not isinstance(params, set):  # torch refuses sets, which have no order
        params = list(params)
    named_or_not = [param[1] if isinstance(param, tuple) else param for param in params]
    tensors = [param for param in named_or_not if isinstance(param, Tensor)]  # torch refuses anything else
    check_params(tensors, "one group")
    check_fit(options, tensors, others)
    group = {**group, "params": params, **calibration.calibration_of(group, defaults)}
    whole = {**defaults, **group}
    if isinstance(whole["lr"], Tensor) and follow_lr(whole) is not None:
        group[SO_FAR] = whole[SO_FAR]  # from the start, or torch.compile would compile a second step anew
    group.pop("decoupled_weight_decay", None)  # in a state dict it would say that torch's AdamW saved it
    if "process_group" in group:
        group["process_group"] = ShardedOver.checked(group["process_group"])
    return group


def check_fit(options: Options, params: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
    """Refuses a backend that cannot serve these parameters, and a total that they and the others exceed.

    Padding makes a buffer longer than the model, but not twice as long.
    """
    for param in params:
        backends.choose(param, options)
    local_numel = sum(local_tensor(param).numel() for param in (*others, *params))
    if options.total_numel is not None and 2 * options.total_numel < local_numel:
        raise ValueError(
            f"FusedAdamS got total_numel={options.total_numel}, but this rank alone has {local_numel} elements. Pass "
            "the number of elements of the whole model, on all ranks and without padding; or None to count them."
        )


def check_all(options: Options, defaults: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Refuses options that all groups together have no use for, and warns of what they make of them."""
    if options.uses_sums:
        refuse_tensor_alone(options.shared_sum)
    calibration.check_some_group_decays(defaults["adamw_weight_decay"], groups)
    check_use_of_warmup(groups)
    if options.seed and not options.stochastic_rounding and all(group["state_dtype"] != "8bit" for group in groups):
        raise ValueError(
            f'FusedAdamS got seed={options.seed} without stochastic_rounding=True or state_dtype="8bit", the options '
            "that use it."
        )
    _check_use_of_precision(options, {param.dtype for group in groups for param in group["params"]})
    _warn_of_values(options, groups)


def _check_use_of_precision(options: Options, dtypes: Collection[torch.dtype]) -> None:
    """Refuses options for 16-bit parameters where there are none."""
    got = f"for parameters of {', '.join(sorted(map(str, dtypes)))}"
    advice = "Convert the model first, or leave it out."
    if options.master_weights and not any(options.master_key(dtype) for dtype in dtypes):
        raise ValueError(
            f"FusedAdamS got master_weights=True {got}, wanted some of torch.bfloat16 or torch.float16: wider ones are "
            f"their own masters. {advice}"
        )
    if options.stochastic_rounding and torch.bfloat16 not in dtypes:
        raise ValueError(
            f"FusedAdamS got stochastic_rounding=True {got}, wanted some of torch.bfloat16, the only dtype that is "
            f"rounded so. {advice}"
        )


def _warn_of_values(options: Options, groups: Sequence[Group]) -> None:
    """Warns if 8 bits are asked for and no parameter can have them, if bfloat16 parameters are too coarse for the
    learning rate, and of AdamW's weight decay where nothing multiplies it by a learning rate."""
    coded = [param for group in groups if group["state_dtype"] == "8bit" for param in group["params"]]
    if coded and not any(map(eight_bit.fits, coded)):
        warn_user(
            f'FusedAdamS got state_dtype="8bit" for {len(coded)} parameters of which none can have 8-bit moments: '
            f"those are for float32, bfloat16 and float16 tensors of at least {eight_bit.LEAST_NUMEL:,} elements, and "
            f"vectors of {eight_bit.LEAST_VECTOR:,}. It has no effect.",
        )
    keeps_small_updates = options.master_weights or options.stochastic_rounding
    rounded = [group for group in groups if any(param.dtype == torch.bfloat16 for param in group["params"])]
    lrs = [group["lr"] for group in rounded if not isinstance(group["lr"], Tensor)]
    small = [lr for lr in lrs if 0 < lr < SMALL_LR_FOR_BFLOAT16]
    if small and not keeps_small_updates:
        warn_user(
            f"FusedAdamS got bfloat16 parameters with lr={small[0]:g}: most updates are smaller than what bfloat16 "
            "resolves and will be lost. Use master_weights=True, which keeps float32 copies, or "
            "stochastic_rounding=True, which takes no memory.",
        )
    largest = max((group["weight_decay"] for group in groups), default=0.0)
    if options.decay == "independent" and largest > LARGE_SHARE:
        warn_user(
            f"FusedAdamS got weight_decay={largest:g} with decay='independent': each step at the largest learning rate "
            f"removes {100 * largest:.3g}% of each weight. AdamW's value times its largest learning rate decays as "
            "AdamW's.",
        )
