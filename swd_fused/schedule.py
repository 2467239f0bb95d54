"""The schedule in PyTorch: the number between the two passes, and the scalars that follow from it.

Nothing here waits for the device. Sums and scalars are float64 where the device has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swd_fused.upload import upload


def scalar_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class Hyper:
    """Hyper-parameters as a table with a row for each parameter group; its columns by name."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        self.numbers = hyper_numbers(groups)
        self.table = upload(torch.tensor(self.numbers, dtype=scalar_dtype(device), device="cpu"), device)
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.max_decay, self.sign = self.table.unbind(1)

    def set_tensor_lrs(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """What is a tensor is read in each step anew, on the device: schedulers change it in place."""
        for index, group in enumerate(groups):
            if isinstance(group["lr"], Tensor):
                self.lr[index].copy_(group["lr"].detach().reshape(()).clamp(min=0), non_blocking=True)


def hyper_numbers(groups: Sequence[Mapping[str, Any]]) -> list[tuple[float, ...]]:
    """The table's rows on the host. A `sign` of -1 maximizes; an `lr` of -1 stands for a tensor, not read here."""
    return [
        (
            -1.0 if isinstance(group["lr"], Tensor) else max(0.0, group["lr"]),
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["max_decay"],
            -1.0 if group["maximize"] else 1.0,
        )
        for group in groups
    ]


def clip_factor(grad_norm: Tensor, max_grad_norm: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` has it, its 1e-6 included."""
    return (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)


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
