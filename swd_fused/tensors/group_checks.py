"""Checks of parameter groups: their hyper-parameters, parameters and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from swd_fused.distributed.sharding import ShardedOver
from swd_fused.options import (
    GLOBAL_OPTIONS,
    GROUP_OPTIONS,
    STATE_DTYPES,
    Decay,
    did_you_mean,
    is_number,
    message,
    refuse_differentiable,
)

KNOWN_KEYS = {"params", *GROUP_OPTIONS}
FLAGS = ("amsgrad", "maximize", "bias_correction")

# Schedulers that end at zero miss it by a rounding error: LinearLR gives -1.9e-20. Treated as zero.
LR_ROUNDING = 1e-12


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
        raise ValueError(message("lr", lr, "a finite number >= 0"))


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


def check_decay(group: Mapping[str, Any], decay: Decay) -> None:
    """Refuses a group whose kind of decay is not that of the optimizer."""
    if group["decay"] != decay:
        raise ValueError(
            f"FusedAdamS got decay={group['decay']!r} in a parameter group, but it holds for all groups, and this "
            f"optimizer has decay={decay!r}. Pass it to the constructor: FusedAdamS(..., decay={group['decay']!r})."
        )


def check_state_dtype(state_dtype: object) -> None:
    if state_dtype is not None and not any(state_dtype is known or state_dtype == known for known in STATE_DTYPES):
        raise ValueError(message("state_dtype", state_dtype, f"one of {STATE_DTYPES} or None"))


def check_group(group: Mapping[str, Any], decay: Decay) -> None:
    """Checks a group before a step, since schedulers and users may have set anything.

    Betas of 1 and more pass, as they do in Adam: schedulers that cycle the momentum set what they are told to.
    """
    _check_names(group)
    refuse_differentiable(group)
    check_decay(group, decay)
    for name in FLAGS:
        if not isinstance(group[name], bool):
            raise ValueError(message(name, group[name], "True or False"))
    check_state_dtype(group["state_dtype"])
    if "process_group" in group:
        ShardedOver.checked(group["process_group"])
    if group["adamw_weight_decay"] is not None:
        check_adamw_weight_decay(group["adamw_weight_decay"], decay)
    steps = group["calibration_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(message("calibration_steps", steps, "a whole number >= 0, the steps that are left"))
    _check_numbers(group)


def check_adamw_weight_decay(weight_decay: object, decay: Decay) -> None:
    if decay != "scheduled":
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={weight_decay!r} with decay={decay!r}, which is AdamW's or Adam's own. "
            "Use weight_decay."
        )
    if not (is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(message("adamw_weight_decay", weight_decay, "a finite number >= 0, as AdamW takes it"))


def _check_numbers(group: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if name == "lr" and isinstance(value, Tensor):
            if value.numel() != 1 or not value.is_floating_point():
                raise ValueError(message(name, value, "a number, or a floating-point tensor with one element"))
        elif not (is_number(value) and (0 if name != "lr" else -LR_ROUNDING) <= value < math.inf):
            raise ValueError(message(name, value, "a finite number >= 0"))
    betas = group["betas"]
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(_is_beta, betas))):
        raise ValueError(
            message("betas", betas, "two numbers, or tensors with one", "Adam's usual choice is (0.9, 0.999).")
        )
    if not (is_number(group["max_decay"]) and 0 < group["max_decay"] <= 1):
        raise ValueError(
            message("max_decay", group["max_decay"], "a number in (0, 1]", "1 lets a step remove the whole weight.")
        )


def _is_beta(value: object) -> bool:
    """Reads tensors: whoever takes betas as numbers does so too."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point() and 0 <= float(value.detach()) < math.inf
    return is_number(value) and 0 <= value < math.inf


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
