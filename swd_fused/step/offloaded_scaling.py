"""Loss scaling where gradients have left the GPU: GradScaler, which looks for infinities there, is told of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from swd_fused.step.hooks import StepCall

# Between a GradScaler and what it calls: hooks, profilers, schedulers and frameworks wrap `step`.
FRAMES = 20

Scaling = tuple[Tensor | None, Tensor | None]


def is_scaled(call: StepCall) -> bool:
    return call.scaling != (None, None)


def scaling_on_host(call: StepCall, grad_sqs: Iterable[float | None]) -> Scaling:
    """Returns the loss scale, and whether there is an infinity in any gradient: in those that the scaler has seen, or
    in those whose squares were summed. Tells the scaler, which else would not lower its scale."""
    scale, found_inf = call.scaling
    if scale is None and found_inf is None:
        return None, None
    if scale is None:
        refuse_unscale()
    found = bool(found_inf) or not math.isfinite(math.fsum(value or 0.0 for value in grad_sqs))
    tell_scaler(torch.full((), float(found), dtype=torch.float32, device=scale.device))
    return scale, torch.full((), float(found), dtype=torch.float32, device="cpu")


def tell_scaler(found: Tensor) -> None:
    """Has the GradScaler that has called a step know what it could not find. It passes no reference to itself."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler) and frame.f_code.co_name == "step":
            state = scaler._per_optimizer_states[id(frame.f_locals["optimizer"])]
            state["found_inf_per_device"][found.device] = found
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def refuse_unscale() -> NoReturn:
    raise RuntimeError(
        "FusedAdamS.step() was called by a GradScaler after scaler.unscale_(optimizer), with offload=True: the "
        "gradients have left the GPU, and are still scaled. Leave unscale_ out: step() does it. To clip use "
        "max_grad_norm=, which looks at unscaled gradients."
    )


def refuse_scaler_in_backward() -> NoReturn:
    raise RuntimeError(
        "FusedAdamS.step() was called by a GradScaler with offload=True, where the backward pass steps parameters "
        'already: with schedule="lagged", or with other kinds of decay after a step without the scaler. An infinity '
        'would be found too late. Use schedule="exact" and the scaler from the first step on, or bfloat16, which needs '
        "no loss scaling."
    )
