"""The schedule in PyTorch: from four sums to the mean, and from the mean to clip and decay factors.

Nothing here waits for the device. Sums and scalars are float64 where the device has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused import captures
from swd_fused.group_checks import check_group, check_tensor_lr
from swd_fused.options import Decay
from swd_fused.transfer import from_host, is_fake, to_device


def scalar_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class Sums(NamedTuple):
    """The four sums between the passes, over all groups, devices and ranks: zero-dimensional tensors.

    The sum of v^, the bias-corrected second moment, is carried + grad_factor^2 * fresh. `grad_sq` is None where no pass
    has read the gradients yet.
    """

    grad_sq: Tensor | None  # of squared gradients, as they are in `.grad`
    carried: Tensor  # what v^ has of the steps before
    fresh: Tensor  # what v^ gets from this step's gradients
    numel: Tensor  # the number of elements

    def mean(self, grad_factor: Tensor | None, total_numel: int | None) -> Tensor:
        """Returns exp_avg_sq_mean, on which the schedule depends."""
        fresh = self.fresh if grad_factor is None else grad_factor.square() * self.fresh
        return (self.carried + fresh) / (self.numel.clamp(min=1) if total_numel is None else total_numel)


class StepScalars(NamedTuple):
    """Holds the results of a step as zero-dimensional tensors."""

    exp_avg_sq_mean: Tensor
    grad_norm: Tensor  # before clipping
    skip: Tensor | None  # 1 if the step has changed nothing, else 0


class Gate(NamedTuple):
    """Decides how gradients are scaled and whether the step is taken at all.

    `grad_scale` and `found_inf` are tensors of one float32 that torch.amp.GradScaler sets for a step.
    """

    max_grad_norm: float | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    skip_nonfinite: bool = False

    @property
    def may_skip(self) -> bool:
        return self.found_inf is not None or self.skip_nonfinite

    def on(self, device: torch.device) -> Gate:
        """Returns the gate with its tensors as kernels on this device read them."""
        if self.grad_scale is None and self.found_inf is None:
            return self
        scale, found = (
            None if value is None else to_device(value.detach(), device, torch.float32)
            for value in (self.grad_scale, self.found_inf)
        )
        return self._replace(grad_scale=scale, found_inf=found)

    def unscale(self, device: torch.device) -> Tensor | None:
        """Returns the inverse of the loss scale."""
        return None if self.grad_scale is None else _scalar_on(self.grad_scale, device).reciprocal()

    def grad_norm(self, grad_sq: Tensor) -> Tensor:
        """Returns the norm of the unscaled gradients, before clipping."""
        unscale = self.unscale(grad_sq.device)
        return grad_sq.sqrt() if unscale is None else unscale * grad_sq.sqrt()

    def grad_factor(self, grad_sq: Tensor | None, device: torch.device) -> Tensor | None:
        """Returns what gradients are to be multiplied by."""
        unscale = self.unscale(device)
        if self.max_grad_norm is None:
            return unscale
        assert grad_sq is not None, "clipping needs pass 1 or the caller's sum"
        clip = clip_factor(self.grad_norm(grad_sq), self.max_grad_norm)
        return clip if unscale is None else unscale * clip

    def found(self, device: torch.device) -> Tensor:
        """Returns 1 if GradScaler found an infinity here, else 0."""
        if self.found_inf is None:
            return torch.zeros((), dtype=scalar_dtype(device), device=device)
        return (_scalar_on(self.found_inf, device) != 0).to(scalar_dtype(device))

    def skip(self, found: Tensor, grad_sq: Tensor | None) -> Tensor | None:
        """Returns 1 if the step must change nothing, given what all ranks have `found`."""
        if not self.may_skip:
            return None
        skip = found != 0
        if self.skip_nonfinite and grad_sq is not None:
            skip = skip | ~self.grad_norm(grad_sq).isfinite()
        return skip.to(found.dtype)


def _scalar_on(value: Tensor, device: torch.device) -> Tensor:
    return to_device(value.detach().reshape(()), device, scalar_dtype(device))


class HyperRow(NamedTuple):
    """Holds the hyper-parameters of a parameter group. Of the three kinds of decay two are zero."""

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
        self.table = from_host(torch.tensor(rows, dtype=scalar_dtype(device), device="cpu"), device)
        self._columns: dict[str, Tensor] = {}

    def column(self, name: str) -> Tensor:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = self.table[:, HyperRow._fields.index(name)]
        return column

    def set_tensor_lrs(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copies learning rates that are tensors, on the device, in each step: schedulers change them in place."""
        for index, group in enumerate(groups):
            if isinstance(group["lr"], Tensor):
                if group["lr"].is_cpu and captures.is_capturing(self.table.device):
                    raise ValueError(
                        f"step got lr={group['lr'].item():g} as a CPU tensor in the capture of a CUDA graph, which "
                        'could not follow its changes. Use lr=torch.tensor(..., device="cuda"), which the graph reads '
                        "in each replay, or a number, which stays as it is in the graph."
                    )
                self.column("lr")[index].copy_(group["lr"].detach().reshape(()).clamp(min=0), non_blocking=True)


def hyper_rows(groups: Sequence[Mapping[str, Any]], decay: Decay = "scheduled") -> list[HyperRow]:
    """Returns the table's rows. Betas that are tensors are read, which waits for their device if it is not the CPU."""
    return [
        HyperRow(
            -1.0 if isinstance(group["lr"], Tensor) else max(0.0, group["lr"]),
            float(group["betas"][0]),
            float(group["betas"][1]),
            group["eps"],
            group["weight_decay"] if decay == "scheduled" and group.get("adamw_weight_decay") is None else 0.0,
            group["max_decay"],
            -1.0 if group["maximize"] else 1.0,
            group["weight_decay"] if decay == "decoupled" else group.get("adamw_weight_decay") or 0.0,
            group["weight_decay"] if decay == "l2" else 0.0,
            float(group.get("bias_correction", True)),
        )
        for group in groups
    ]


class HyperRows:
    """The rows of an optimizer's groups, made and checked anew only when something has changed in a group."""

    def __init__(self, decay: Decay) -> None:
        self._decay = decay
        self._seen: list[object] = []  # all keys and values
        self._rows: list[HyperRow] = []
        self._lrs: list[Tensor] = []  # those that are tensors and can be read: schedulers change them in place

    def current(self, groups: Sequence[Mapping[str, Any]]) -> list[HyperRow]:
        """Returns the rows, and the same list as long as they are equal."""
        seen = [*chain.from_iterable(groups), *chain.from_iterable(map(_VALUES, groups))]
        if len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            self._seen = []
            for group in groups:
                check_group(group, self._decay)
            rows = hyper_rows(groups, self._decay)
            self._rows = self._rows if rows == self._rows else rows
            lrs = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
            self._lrs = [lr for lr in lrs if lr.is_cpu and not is_fake(lr)]
            # A list, or a tensor among the betas, can change without becoming another object.
            betas = [group["betas"] for group in groups]
            can_change = any(type(both) is not tuple or any(map(_is_tensor, both)) for both in betas)
            self._seen = [] if can_change else seen
        for lr in self._lrs:
            check_tensor_lr(lr)
        return self._rows


_VALUES = methodcaller("values")


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def bias_corrections(hyper: Hyper, groups: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both bias corrections of each tensor at these step counts."""
    corrects_bias = hyper.column("corrects_bias")[groups]
    beta1, beta2 = hyper.column("beta1")[groups], hyper.column("beta2")[groups]
    return bias_correction(beta1, corrects_bias, steps), bias_correction(beta2, corrects_bias, steps)


def bias_correction(beta: Tensor, corrects_bias: Tensor, steps: Tensor) -> Tensor:
    """Returns 1 - beta^steps by tensor, in beta's dtype; or 1 where bias is not corrected."""
    return 1 - corrects_bias * beta**steps


def clip_factor(grad_norm: Tensor, max_grad_norm: float) -> Tensor:
    """Returns the factor that clips gradients, as `torch.nn.utils.clip_grad_norm_` has it, its 1e-6 included."""
    return (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def scheduled_weight_decay(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """The schedule: what `weight_decay` acts like in AdamW at this mean, by group.

    A mean of zero (no gradient but zeros so far) decays nothing; nor does NaN, which would spread to all weights.
    """
    scheduled = hyper.column("weight_decay") / (exp_avg_sq_mean.sqrt() + hyper.column("eps"))
    return torch.where(exp_avg_sq_mean > 0, scheduled, 0.0)


def effective_weight_decay(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """Returns AdamW's weight decay that would shrink as much, within `max_decay`, by group."""
    scheduled = scheduled_weight_decay(exp_avg_sq_mean, hyper)
    return torch.minimum(scheduled, hyper.column("max_decay") / hyper.column("lr")) + hyper.column("decoupled_decay")


def decay_factor(exp_avg_sq_mean: Tensor, hyper: Hyper) -> Tensor:
    """Returns the factor that weights are multiplied by, as AdamW would with the effective weight decay.

    Computed by itself: with `lr=0` the effective weight decay may be infinite, and times 0 that is NaN.
    """
    lr = hyper.column("lr")
    shrink = lr * hyper.column("weight_decay") / (exp_avg_sq_mean.sqrt() + hyper.column("eps"))
    scheduled = torch.where(exp_avg_sq_mean > 0, torch.minimum(shrink, hyper.column("max_decay")), 0.0)
    return 1 - scheduled - lr * hyper.column("decoupled_decay")
