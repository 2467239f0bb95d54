"""AdamS in the form in which the paper's authors publish it: the slow peer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT


class AuthorsLoop(Optimizer):
    """Two Python loops over the parameters, and between them a wait for the mean second moment.

    Written from the algorithm. As in the authors' code, and unlike in the paper and in `FusedAdamS`, no `eps` is added
    to the schedule's denominator, and nothing bounds the decay.
    """

    def __init__(self, params: ParamsT, weight_decay: float = 5e-4, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pairs = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        elements = sum(param.numel() for _, param in pairs)
        exp_avg_sq_hat_sum: Tensor | float = 0.0
        for group, param in pairs:
            beta1, beta2 = group["betas"]
            state = self.state[param]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            state["step"] += 1
            state["exp_avg"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
            exp_avg_sq_hat = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
            exp_avg_sq_hat_sum = exp_avg_sq_hat_sum + exp_avg_sq_hat.sum()

        rms_gradient = math.sqrt(exp_avg_sq_hat_sum / elements)

        for group, param in pairs:
            beta1, beta2 = group["betas"]
            state = self.state[param]
            if group["weight_decay"] != 0:
                param.mul_(1 - group["lr"] * group["weight_decay"] / rms_gradient)
            exp_avg_sq_hat = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
            denominator = exp_avg_sq_hat.sqrt().add(group["eps"])
            param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
