"""AdamS in the form in which the paper's authors publish it: the slow peer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT


class AuthorsLoop(Optimizer):
    """Two Python loops over the parameters, and between them a wait for the mean second moment.

    Written from the algorithm. As in the authors' code, and unlike in the paper and in `FusedAdamS`, no `eps` is added
    to the schedule's denominator, and nothing bounds the decay.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        elements = 0
        exp_avg_sq_hat_sum: Tensor | float = 0.0
        for group, param, grad in self._with_gradient():
            beta1, beta2 = group["betas"]
            state = self.state[param]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
            state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            exp_avg_sq_hat = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
            exp_avg_sq_hat_sum = exp_avg_sq_hat_sum + exp_avg_sq_hat.sum()
            elements += param.numel()

        rms_gradient = math.sqrt(exp_avg_sq_hat_sum / elements) if elements else 0.0

        for group, param, _ in self._with_gradient():
            beta1, beta2 = group["betas"]
            state = self.state[param]
            if group["weight_decay"] != 0:
                param.mul_(1 - group["lr"] * group["weight_decay"] / rms_gradient)
            exp_avg_sq_hat = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
            denominator = exp_avg_sq_hat.sqrt().add(group["eps"])
            step_size = group["lr"] / (1 - beta1 ** state["step"])
            param.addcdiv_(state["exp_avg"], denominator, value=-step_size)
        return loss

    def _with_gradient(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad
