"""SGDS: SGD whose weight decay is decoupled and has the strength that L2 regularization has in the long run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT


class SGDS(Optimizer):
    """The paper's SGD with stable weight decay, in plain PyTorch.

    Momentum adds a gradient up to (1 - dampening) / (1 - momentum) times, so weights are multiplied by
    1 - lr * weight_decay * (1 - dampening) / (1 - momentum) before each step of `torch.optim.SGD` without decay. There
    is no schedule, since SGD's learning rate is not adaptive; `ScheduledWeightDecay(torch.optim.SGD(...))` has one.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate.
        momentum: share of the running sum that is kept.
        dampening: share of a gradient that is left out of the running sum, except the first one's.
        weight_decay: the paper's lambda, as large as for `torch.optim.SGD`.
        nesterov: look ahead along the running sum. Needs momentum, and no dampening.
        maximize: ascend instead of descend.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 5e-4,
        *,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        rates = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**rates, "nesterov": nesterov, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shrink = group["lr"] * group["weight_decay"] * (1 - group["dampening"]) / (1 - group["momentum"])
            for param in (param for param in group["params"] if param.grad is not None):
                param.mul_(1 - shrink)
                param.sub_(group["lr"] * self._direction(param, param.grad, group))
        return loss

    def _direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        grad, momentum = -grad if group["maximize"] else grad, group["momentum"]
        if momentum == 0:
            return grad
        state = self.state[param]
        if "momentum_buffer" in state:
            state["momentum_buffer"].mul_(momentum).add_(grad, alpha=1 - group["dampening"])
        else:
            state["momentum_buffer"] = grad.clone(memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        return grad + momentum * buffer if group["nesterov"] else buffer


def _check(group: dict[str, Any]) -> None:
    for name, most in (("lr", math.inf), ("weight_decay", math.inf), ("momentum", 1), ("dampening", 1)):
        if not 0 <= group[name] < most:
            raise ValueError(f"SGDS got {name}={group[name]!r}, wanted a number in [0, {most}).")
    if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
        raise ValueError("SGDS got nesterov=True, wanted a momentum > 0 and a dampening of 0 with it.")
