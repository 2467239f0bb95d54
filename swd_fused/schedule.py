"""The number between the two passes: what all groups, devices and tensors share.

Nothing here waits for the device. Sums and scalars are float64 where the device has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def scalar_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class Hyper:
    """Hyper-parameters as a table with a row for each parameter group, or for each tensor; its columns by name.

    `sign` is -1 where a group maximizes.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.max_decay, self.sign = table.unbind(1)

    @staticmethod
    def of(groups: Sequence[Mapping[str, Any]], device: torch.device) -> Hyper:
        lrs = [group["lr"] for group in groups]
        rows = [
            (
                0.0 if isinstance(lr, Tensor) else lr,
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                group["max_decay"],
                -1.0 if group["maximize"] else 1.0,
            )
            for lr, group in zip(lrs, groups, strict=True)
        ]
        table = torch.tensor(rows, dtype=scalar_dtype(device), device=device)
        for row, lr in zip(table, lrs, strict=True):
            if isinstance(lr, Tensor):
                row[:1].copy_(lr.detach().reshape(1), non_blocking=True)
        return Hyper(table)

    def rows(self, indices: Tensor) -> Hyper:
        return Hyper(self.table[indices])

    def to(self, device: torch.device) -> Hyper:
        return Hyper(self.table.to(device, non_blocking=True))

    def matching_adamw(self, weight_decay: float, exp_avg_sq_mean: Tensor) -> Hyper:
        """With the decay that at this mean shrinks weights as AdamW's would, in the groups that decay at all."""
        matching = Hyper(self.table.clone())
        scaled = weight_decay * (exp_avg_sq_mean.sqrt() + self.eps)
        matching.weight_decay.copy_(torch.where(self.weight_decay > 0, scaled, 0.0))
        return matching


def clip_factor(grad_norm: Tensor, max_grad_norm: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` has it, its 1e-6 included."""
    return (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def bias_corrections(hyper: Hyper, steps: Tensor) -> tuple[Tensor, Tensor]:
    return 1 - hyper.beta1**steps, 1 - hyper.beta2**steps


def next_exp_avg_sq_sums(sums: Tensor, grad_sums: Tensor, beta2: Tensor, clip: Tensor | None) -> Tensor:
    """Sums of exp_avg_sq after this step, before it is taken: the recursion of each element holds for sums.

    beta2 * sums + (1 - beta2) * grad_sums, of the clipped gradients.
    """
    return torch.lerp(grad_sums if clip is None else clip.square() * grad_sums, sums, beta2)


def scheduled_weight_decay(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """The schedule: what `weight_decay` acts like in AdamW at this mean, by group.

    A mean of zero (no gradient but zeros so far) decays nothing; nor does NaN, which would spread to all weights.
    """
    scheduled = hyper.weight_decay / (exp_avg_sq_mean.sqrt() + hyper.eps)
    return torch.where(exp_avg_sq_mean > 0, scheduled, 0.0)


def effective_weight_decay(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """The same within `max_decay`, the share of a weight that a step may remove."""
    return torch.minimum(scheduled_weight_decay(exp_avg_sq_mean, hyper), hyper.max_decay / hyper.lr)


def decay_factor(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """What weights are multiplied by, as AdamW would with the effective weight decay."""
    return 1 - hyper.lr * effective_weight_decay(exp_avg_sq_mean, hyper)
