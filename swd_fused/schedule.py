"""The schedule in PyTorch: the number between the two passes, and the scalars that follow from it.

Nothing here waits for the device. Sums and scalars are float64 where the device has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused import captures
from swd_fused.upload import upload


def scalar_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class HyperRow(NamedTuple):
    """What holds for a parameter group. Of the three kinds of decay two are zero."""

    lr: float  # -1 stands for a tensor, which is not read here
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # scheduled: the paper's
    max_decay: float
    sign: float  # -1 to maximize
    decoupled_decay: float  # AdamW's
    l2: float  # Adam's
    corrects_bias: float  # 1 or 0


class Hyper:
    """Hyper-parameters as a table with a row for each parameter group."""

    def __init__(self, rows: list[HyperRow], device: torch.device) -> None:
        self.numbers = rows
        self.is_captured = captures.is_capturing(device)  # then the table is the graph's own, and uploaded by it
        self.table = upload(torch.tensor(rows, dtype=scalar_dtype(device), device="cpu"), device)

    def column(self, name: str) -> Tensor:
        return self.table[:, HyperRow._fields.index(name)]

    def set_tensor_lrs(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """What is a tensor is read in each step anew, on the device: schedulers change it in place."""
        for index, group in enumerate(groups):
            if isinstance(group["lr"], Tensor):
                if group["lr"].is_cpu and captures.is_capturing(self.table.device):
                    raise ValueError(
                        f"step got lr={group['lr'].item():g} as a CPU tensor in the capture of a CUDA graph, which "
                        'could not follow its changes. Use lr=torch.tensor(..., device="cuda"), which the graph reads '
                        "in each replay, or a number, which stays as it is in the graph."
                    )
                self.column("lr")[index].copy_(group["lr"].detach().reshape(()).clamp(min=0), non_blocking=True)


def hyper_rows(
    groups: Sequence[Mapping[str, Any]], decay: str = "scheduled", bias_correction: bool = True
) -> list[HyperRow]:
    return [
        HyperRow(
            -1.0 if isinstance(group["lr"], Tensor) else max(0.0, group["lr"]),
            group["betas"][0],
            group["betas"][1],
            group["eps"],
            group["weight_decay"] if decay == "scheduled" else 0.0,
            group["max_decay"],
            -1.0 if group["maximize"] else 1.0,
            group["weight_decay"] if decay == "decoupled" else 0.0,
            group["weight_decay"] if decay == "l2" else 0.0,
            float(bias_correction),
        )
        for group in groups
    ]


def bias_corrections(hyper: Hyper, groups: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """By tensor, at these step counts."""
    steps = steps.to(hyper.table.dtype)
    corrects_bias = hyper.column("corrects_bias")[groups]
    beta1, beta2 = hyper.column("beta1")[groups], hyper.column("beta2")[groups]
    return 1 - corrects_bias * beta1**steps, 1 - corrects_bias * beta2**steps


def clip_factor(grad_norm: Tensor, max_grad_norm: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` has it, its 1e-6 included."""
    return (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def scheduled_weight_decay(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """The schedule: what `weight_decay` acts like in AdamW at this mean, by group.

    A mean of zero (no gradient but zeros so far) decays nothing; nor does NaN, which would spread to all weights.
    """
    scheduled = hyper.column("weight_decay") / (exp_avg_sq_mean.sqrt() + hyper.column("eps"))
    return torch.where(exp_avg_sq_mean > 0, scheduled, 0.0)


def effective_weight_decay(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """The same within `max_decay`, the share of a weight that a step may remove; or AdamW's own."""
    scheduled = scheduled_weight_decay(exp_avg_sq_mean, hyper)
    return torch.minimum(scheduled, hyper.column("max_decay") / hyper.column("lr")) + hyper.column("decoupled_decay")


def decay_factor(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """What weights are multiplied by, as AdamW would with the effective weight decay."""
    return 1 - hyper.column("lr") * effective_weight_decay(exp_avg_sq_mean, hyper)
