"""The optimizers of the paper by name, with its settings: those left out here are each optimizer's own defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam

from swd_fused import FusedAdamS

# "The displayed weight decay of AdamW is rescaled": lambda / lr at Adam's usual lr of 1e-3, kept at any other lr.
DECOUPLED = 1000.0


class SGDS(SGD):
    """Shrinks weights by what L2 regularization comes to with momentum, then steps without it.

    The decay is no `weight_decay` of its groups, which SGD would add to the gradients.
    """

    def __init__(self, params: Iterable[Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, lr, momentum)
        self.decay = weight_decay / (1 - momentum)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            torch._foreach_mul_([p for p in group["params"] if p.grad is not None], 1 - group["lr"] * self.decay)
        return super().step(closure)


@dataclass(frozen=True)
class Kind:
    """`build` takes parameters, lr and the paper's lambda."""

    build: Callable[[Iterable[Parameter], float, float], Optimizer]
    lr: float = 1e-3


def peer(name: str, **options: Any) -> Callable[[Iterable[Parameter], float, float], Optimizer]:
    def build(params: Iterable[Parameter], lr: float, weight_decay: float) -> Optimizer:
        import pytorch_optimizer

        optimizer: Optimizer = getattr(pytorch_optimizer, name)(params, lr, weight_decay=weight_decay, **options)
        return optimizer

    return build


OPTIMIZERS: dict[str, Kind] = {
    "AdamS": Kind(lambda params, lr, decay: FusedAdamS(params, lr, weight_decay=decay)),
    "AMSGradS": Kind(lambda params, lr, decay: FusedAdamS(params, lr, weight_decay=decay, amsgrad=True)),
    "SGDS": Kind(lambda params, lr, decay: SGDS(params, lr, 0.9, decay), lr=0.1),
    "Adam": Kind(lambda params, lr, decay: Adam(params, lr, weight_decay=decay)),
    "AdamW": Kind(lambda params, lr, decay: AdamW(params, lr, weight_decay=DECOUPLED * decay)),
    "AMSGrad": Kind(lambda params, lr, decay: Adam(params, lr, weight_decay=decay, amsgrad=True)),
    "AMSGradW": Kind(lambda params, lr, decay: AdamW(params, lr, weight_decay=DECOUPLED * decay, amsgrad=True)),
    "SGD": Kind(lambda params, lr, decay: SGD(params, lr, momentum=0.9, weight_decay=decay), lr=0.1),
    "RAdam": Kind(lambda params, lr, decay: RAdam(params, lr, weight_decay=decay)),
    "AdaBound": Kind(peer("AdaBound", weight_decouple=False)),
    "Padam": Kind(peer("PAdam"), lr=0.01),
    "Yogi": Kind(peer("Yogi", weight_decouple=False)),
}


def adamw_weight_decay(optimizer: Optimizer) -> float:
    """The decoupled weight decay at this moment, in AdamW's terms. NaN for L2 regularization, which is none."""
    if isinstance(optimizer, FusedAdamS):
        return optimizer.effective_weight_decay()[0]
    group = optimizer.param_groups[0]
    if isinstance(optimizer, AdamW):
        return float(group["weight_decay"])
    if isinstance(optimizer, SGDS):
        return optimizer.decay
    return float("nan")
