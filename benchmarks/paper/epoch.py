"""What a run measures in each epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.paper.optimizers import adamw_weight_decay


@dataclass
class Epoch:
    """Loss and norms are means over the epoch's minibatches, in train mode and without regularization.

    The paper's G is `squared_grad_norm`. What follows it is as the epoch leaves it, NaN where not measured;
    `summed_decay` is that of all its steps.
    """

    epoch: int
    epoch_lr: float  # as the epoch begins
    train_loss: float
    grad_norm: float
    squared_grad_norm: float
    adamw_weight_decay: float
    weight_norm: float
    test_loss: float = math.nan  # of the part that the run is tested on
    test_error: float = math.nan  # a share
    summed_decay: float = math.nan  # lr times decay in AdamW's terms; NaN for L2 regularization


class EpochMeans:
    """Sums on the device, read once an epoch."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.sums: Tensor | None = None
        self.count = 0
        self.decay = math.nan  # in AdamW's terms, at the last step: one that goes on from a checkpoint knows it no more
        self.summed_decay = 0.0

    def add(self, loss: Tensor, model: nn.Module) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        values = torch.stack([loss.detach(), norm, norm.square()])
        self.sums = values if self.sums is None else self.sums + values
        self.count += 1

    def add_decay(self, optimizer: Optimizer) -> None:
        """Of a step that was just taken, before the lr changes."""
        self.decay = adamw_weight_decay(optimizer)
        self.summed_decay += optimizer.param_groups[0]["lr"] * self.decay

    def epoch(self, number: int, model: nn.Module) -> Epoch:
        assert self.sums is not None
        loss, norm, square = (self.sums / self.count).tolist()
        weight_norm = float(torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()]))
        return Epoch(number, self.lr, loss, norm, square, self.decay, weight_norm, summed_decay=self.summed_decay)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def of(cls, state: dict[str, Any], device: torch.device) -> EpochMeans:
        means = cls(state["lr"])
        means.__dict__.update({**state, "sums": state["sums"].to(device)})
        return means
