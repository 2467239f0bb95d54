"""Checks of parameter groups: their hyper-parameters, parameters and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from swd_fused.checks import FINITE, did_you_mean, message
from swd_fused.distributed.sharding import ShardedOver
from swd_fused.options import (
    GLOBAL_OPTIONS,
    GROUP_OPTIONS,
    LR_ROUNDING,
    Decay,
    GroupOptions,
    check_values,
    refuse_differentiable,
    refuse_offload,
)

KNOWN_KEYS = {"params", *GROUP_OPTIONS}


def check_new_group(group: Mapping[str, Any], defaults: Mapping[str, Any], decay: Decay) -> None:
    """Checks a group that a user adds. Reads tensors, which may wait for a device."""
    whole = {**defaults, **group}
    check_group(whole, decay)
    if isinstance(whole["lr"], Tensor):
        check_tensor_lr(whole["lr"])
    betas = whole["betas"]
    if not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(message("betas", betas, "two numbers in [0, 1)", "Adam's usual choice is (0.9, 0.999)."))


def check_tensor_lr(lr: Tensor) -> None:
    """Reads a learning rate that is a tensor, and refuses nonsense."""
    if not -LR_ROUNDING <= float(lr.detach()) < math.inf:
        raise ValueError(message("lr", lr, FINITE.wanted))


def check_group(group: Mapping[str, Any], decay: Decay) -> None:
    """Checks a group before a step, since schedulers and users may have set anything."""
    refuse_differentiable(group)
    refuse_offload(group)
    _check_names(group)
    if group["decay"] != decay:
        raise ValueError(
            f"FusedAdamS got decay={group['decay']!r} in a parameter group, but it holds for all groups, and this "
            f"optimizer has decay={decay!r}. Pass it to the constructor: FusedAdamS(..., decay={group['decay']!r})."
        )
    if "process_group" in group:
        ShardedOver.checked(group["process_group"])
    if group["adamw_weight_decay"] is not None:
        check_is_scheduled(group["adamw_weight_decay"], decay)
    check_values(GroupOptions, group)
    _check_decay(group, decay)


def _check_names(group: Mapping[str, Any]) -> None:
    """Refuses options that hold for the whole optimizer, and names so close to an option that they must be misspelt.

    Unknown keys pass, as in torch: schedulers and frameworks keep their own in groups.
    """
    for name in group.keys() - KNOWN_KEYS:
        if name in GLOBAL_OPTIONS:
            raise ValueError(
                f"FusedAdamS got {name}={group[name]!r} in a parameter group, but it holds for all groups. Pass it to "
                f"the constructor: FusedAdamS(..., {name}={group[name]!r})."
            )
        if advice := _advice_on(name):
            raise ValueError(f"FusedAdamS got an unknown key {name}={group[name]!r} in a parameter group.{advice}")


@cache
def _advice_on(name: str) -> str:
    """Kept, since comparing names takes long, and a group is looked at in each step in which its `lr` changes."""
    return did_you_mean(name, (*GROUP_OPTIONS, *GLOBAL_OPTIONS))


def _check_decay(group: Mapping[str, Any], decay: Decay) -> None:
    """Refuses what means nothing with this kind of decay."""
    if decay == "l2" and (group["corrected_decay"] or group["cautious_decay"]):
        name = "corrected_decay" if group["corrected_decay"] else "cautious_decay"
        raise ValueError(
            f"FusedAdamS got {name}=True with decay='l2', which acts on the gradient and takes no share of the weight "
            "that could be corrected or left out. Use decay='decoupled' or 'scheduled'."
        )
    if decay == "independent" and group["corrected_decay"]:
        raise ValueError(
            "FusedAdamS got corrected_decay=True with decay='independent', which is related to the largest learning "
            "rate already. Leave it out; or use decay='decoupled', which corrected_decay makes AdamC's."
        )
    if decay == "independent" and group["weight_decay"] >= 1:
        raise ValueError(
            f"FusedAdamS got weight_decay={group['weight_decay']!r} with decay='independent', wanted a number in "
            "[0, 1): the share of a weight that a step removes. AdamW's value times its lr is a good choice."
        )


def check_is_scheduled(adamw_weight_decay: object, decay: Decay) -> None:
    """Refuses AdamW's decay where there is no schedule that could start from it."""
    if decay != "scheduled":
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={adamw_weight_decay!r} with decay={decay!r}, which has no schedule "
            "that could start from it. Use weight_decay."
        )


def check_params(params: Sequence[Tensor], where: str) -> None:
    """Checks the parameters of a new group, or of all groups after someone has changed them."""
    if len(set(map(id, params))) < len(params):
        twice = next(param for i, param in enumerate(params) if any(param is other for other in params[:i]))
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(twice.shape)} twice in {where}, wanted each once: kernels "
            "update all parameters at the same time. Remove duplicates: list(dict.fromkeys(params))."
        )
    for param in params:
        _check_param(param)


def _check_param(param: Tensor) -> None:
    if not (param.is_floating_point() or param.is_complex()):
        raise ValueError(
            f"FusedAdamS got a parameter of dtype {param.dtype} and shape {tuple(param.shape)}, wanted a "
            "floating-point or complex one. Leave it out of the parameter list, or convert it."
        )
    if param.is_conj() or param.is_neg():
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(param.shape)} that is a lazily conjugated or negated view, "
            "wanted one with values of its own. Make the parameter from tensor.resolve_conj().resolve_neg()."
        )
    strides = zip(param.stride(), param.shape, strict=True)
    if param.numel() and any(stride == 0 and size > 1 for stride, size in strides):
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(param.shape)} and strides {param.stride()}, wanted one whose "
            "elements have memory of their own. Make the parameter from tensor.contiguous(), or train what it expands."
        )


GRAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_grads(params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if grad.layout is not torch.strided:
            wanted = "a dense one. Use sparse=False in the embedding, or set param.grad = param.grad.to_dense()."
        elif grad.device != param.device:
            wanted = "one on the parameter's device. Move the model before the backward pass."
        elif grad.shape != param.shape:
            wanted = "one of the parameter's shape. Call zero_grad() after replacing a parameter's data."
        elif grad.dtype.to_real() not in GRAD_DTYPES:
            wanted = f"one of {', '.join(map(str, GRAD_DTYPES))} instead of {grad.dtype}. Convert it."
        else:
            continue
        raise RuntimeError(
            f"FusedAdamS got a {grad.layout} gradient of shape {tuple(grad.shape)} on {grad.device} for a parameter "
            f"of shape {tuple(param.shape)} on {param.device}, wanted {wanted}"
        )
