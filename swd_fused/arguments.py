"""Checks of what users pass in. Each message says what was got, what was wanted and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from swd_fused import backends
from swd_fused.options import DECAYS, Options

SCHEDULES = ("exact", "lagged")
GRAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Schedulers that end at zero miss it by a rounding: LinearLR gives -1.9e-20. Taken as zero.
LR_ROUNDING = 1e-12


def check_options(max_grad_norm: float | None, schedule: str, backend: str) -> None:
    """The options that hold for the whole optimizer, since the schedule and the norm do."""
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(_message("max_grad_norm", max_grad_norm, "a number > 0", "Use None to switch clipping off."))
    if schedule not in SCHEDULES:
        raise ValueError(_message("schedule", schedule, f"one of {SCHEDULES}"))
    if schedule == "lagged" and max_grad_norm is not None:
        raise ValueError(
            f'FusedAdamS got schedule="lagged" with max_grad_norm={max_grad_norm!r}: clipping needs this step\'s norm '
            'before the update, so the pass that "lagged" saves must run anyway. Use schedule="exact", which then '
            "costs the same."
        )
    if backend not in backends.NAMES:
        raise ValueError(_message("backend", backend, f"one of {backends.NAMES}"))


def check_total_numel(total_numel: object) -> None:
    if total_numel is not None and not (isinstance(total_numel, int) and total_numel > 0):
        raise ValueError(_message("total_numel", total_numel, "a whole number > 0, or None to count elements"))


def check_group(group: Mapping[str, Any]) -> None:
    if _is_plain(group):
        return
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if name == "lr" and isinstance(value, Tensor):
            if value.numel() != 1 or not value.is_floating_point():
                raise ValueError(_message(name, value, "a number, or a floating-point tensor with one element"))
        elif not (_is_number(value) and (0 if name != "lr" else -LR_ROUNDING) <= value < math.inf):
            raise ValueError(_message(name, value, "a finite number >= 0"))
    betas = group["betas"]
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)):
        raise ValueError(_message("betas", betas, "two numbers in [0, 1)", "Adam's usual choice is (0.9, 0.999)."))
    if not (_is_number(group["max_decay"]) and 0 < group["max_decay"] <= 1):
        raise ValueError(
            _message(
                "max_decay", group["max_decay"], "a number in (0, 1]", "1 bounds a step at removing the whole weight."
            )
        )


def _is_plain(group: Mapping[str, Any]) -> bool:
    """Floats that are right: what groups mostly hold, and all that is asked of them before each step."""
    lr, betas, eps, weight_decay, max_decay = map(
        group.__getitem__, ("lr", "betas", "eps", "weight_decay", "max_decay")
    )
    return (
        type(lr) is type(eps) is type(weight_decay) is type(max_decay) is float
        and type(betas) is tuple
        and len(betas) == 2
        and type(betas[0]) is type(betas[1]) is float
        and 0 <= lr < math.inf
        and 0 <= eps < math.inf
        and 0 <= weight_decay < math.inf
        and 0 < max_decay <= 1
        and 0 <= betas[0] < 1
        and 0 <= betas[1] < 1
    )


def check_lr_value(lr: float | Tensor) -> None:
    """Reads a tensor's value, so only where waiting for the device does not matter: when a group is added."""
    if isinstance(lr, Tensor) and not 0 <= float(lr) < math.inf:
        raise ValueError(_message("lr", lr, "a finite number >= 0"))


def check_param(param: Tensor) -> None:
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
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(param.shape)} and strides {param.stride()}, wanted one whose "
            "elements have memory of their own. Make the parameter from tensor.contiguous(), or train what it expands."
        )


def check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(_message(name, value, "True or False"))


def checked_decay(decay: str, adam_w_mode: bool, schedule: str, skip_nonfinite: bool) -> str:
    if decay not in DECAYS:
        raise ValueError(_message("decay", decay, f"one of {DECAYS}"))
    if not adam_w_mode and decay == "decoupled":
        raise ValueError(
            'FusedAdamS got adam_w_mode=False, which asks for L2 regularization, with decay="decoupled", which asks '
            "for AdamW's decay. Use one of the two."
        )
    if schedule == "lagged" and (decay != "scheduled" or not adam_w_mode):
        raise ValueError(
            f'FusedAdamS got schedule="lagged" with decay={decay!r}, adam_w_mode={adam_w_mode!r}, which need no '
            "schedule and so no second pass. Leave schedule out."
        )
    if schedule == "lagged" and skip_nonfinite:
        raise ValueError(
            'FusedAdamS got schedule="lagged" with skip_nonfinite=True: that needs this step\'s norm before the '
            'update, so the pass that "lagged" saves must run anyway. Use schedule="exact", which then costs the same.'
        )
    return decay if adam_w_mode else "l2"


def check_not_in_backward(grad_sumsq: object) -> None:
    """Hooks that step each parameter as soon as its gradient is there would silently get a schedule of their own."""
    if grad_sumsq is None and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "FusedAdamS.step() was called within a backward pass, as register_post_accumulate_grad_hook does to free "
            "gradients early. The schedule is a mean over the whole model, which is not known before all gradients "
            'are. Call step() after backward(). To free gradients early use schedule="lagged", whose mean is known '
            "before, and call optimizer.release_gradients() once: it steps parameters in the backward pass, and "
            "step() after backward() ends the step."
        )


def check_can_release(needs_one_pass: bool, max_grad_norm: float | None, options: Options) -> None:
    if max_grad_norm is not None or options.skip_nonfinite:
        got = "skip_nonfinite=True" if max_grad_norm is None else f"max_grad_norm={max_grad_norm!r}"
        raise ValueError(
            f"release_gradients was called with {got}, which needs the norm of all gradients before the first update. "
            "Leave that out, or gradient release."
        )
    if not needs_one_pass:
        raise ValueError(
            'release_gradients was called with schedule="exact": its mean is not known before all gradients are. Use '
            'schedule="lagged", whose mean is that of the step before.'
        )


def check_step_of_released(has_closure: bool, gives_sum: bool, is_scaled: bool) -> None:
    """What `step` cannot be told after gradients were released."""
    if has_closure:
        raise RuntimeError(
            "FusedAdamS.step() got a closure with release_gradients() on, wanted none: parameters are stepped while it "
            "runs the backward pass. Call backward() first, then step() without it."
        )
    if gives_sum:
        raise RuntimeError(
            "FusedAdamS.step() got the gradients' sum of squares with release_gradients() on, after most of them were "
            'stepped and freed. Use one of the two: grad_sumsq, or gradient release with schedule="lagged".'
        )
    if is_scaled:
        raise RuntimeError(
            "FusedAdamS.step() was called by a GradScaler with release_gradients() on: the loss scale, and whether to "
            "skip the step, come after most gradients were stepped and freed. Train in bfloat16, which needs no loss "
            "scaling, or without gradient release."
        )


def second_gradient(param: Tensor) -> str:
    return (
        f"A parameter of shape {tuple(param.shape)} got a second gradient before optimizer.step(), but with "
        "release_gradients() on its first gradient is used up. To accumulate gradients over several backward passes "
        "run all but the last within optimizer.accumulate_gradients(). After a backward pass that has failed call "
        "optimizer.zero_grad() and optimizer.step(), which ends the step for the parameters that have taken it."
    )


def check_adamw_weight_decay(weight_decay: float, decay: str) -> None:
    if decay != "scheduled":
        raise ValueError(
            f"match_adamw is for the schedule, but this optimizer has decay={decay!r}. Set weight_decay instead."
        )
    if not (_is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(_message("match_adamw(weight_decay)", weight_decay, "a finite number >= 0, as AdamW takes it"))


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


def check_state(params: list[Tensor], moments: list[list[Tensor]]) -> None:
    for tensors in moments:
        for param, tensor in zip(params, tensors, strict=True):
            if tensor.shape != param.shape or tensor.device != param.device:
                raise RuntimeError(
                    f"FusedAdamS has state of shape {tuple(tensor.shape)} on {tensor.device} for a parameter that now "
                    f"has shape {tuple(param.shape)} on {param.device}, wanted both alike. After replacing a parameter "
                    "by another one delete its state: del optimizer.state[param]."
                )


def _is_number(value: object) -> bool:
    return isinstance(value, (float, Real)) and not isinstance(value, bool) and not math.isnan(value)


def _message(name: str, got: object, wanted: str, advice: str = "") -> str:
    return f"FusedAdamS got {name}={got!r}, wanted {wanted}. {advice}".rstrip()
