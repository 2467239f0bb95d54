"""Computes the mean, the gradients' factor and the decision to skip a step from the four sums.

Nothing here waits for the device. Sums and scalars are float64 where the device has it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.devices.transfer import scalar_dtype, to_device


class Sums(NamedTuple):
    """Holds the four sums between the passes, over all groups, devices and ranks, as zero-dimensional tensors.

    The sum of v^, the bias-corrected second moment, is carried + grad_factor^2 * fresh. `grad_sq` is None where no pass
    has read the gradients yet.
    """

    grad_sq: Tensor | None  # the sum of squared gradients, as they are in `.grad`
    carried: Tensor  # the part of v^ that comes from earlier steps
    fresh: Tensor  # the part of v^ that comes from this step's gradients
    numel: Tensor  # the number of elements

    def mean(self, grad_factor: Tensor | None, total_numel: int | None) -> Tensor:
        """Returns exp_avg_sq_mean, the mean of v^ on which the schedule depends."""
        fresh = self.fresh if grad_factor is None else grad_factor.square() * self.fresh
        return (self.carried + fresh) / (self.numel.clamp(min=1) if total_numel is None else total_numel)


class Gate(NamedTuple):
    """Decides how gradients are scaled and whether the step is taken at all.

    `grad_scale` and `found_inf` are tensors of one float32 that torch.amp.GradScaler sets for a step.
    """

    max_grad_norm: float | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    skip_nonfinite: bool = False
    may_skip: bool = False  # whether the step can be skipped at all, by a found infinity or by its norm

    def on(self, device: torch.device) -> Gate:
        """Returns the gate with its tensors as float32 on this device, as kernels read them."""
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
        """Returns the factor by which the step multiplies gradients. None stands for 1."""
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
        """Returns 1 if the step must change nothing, else 0. `found` is not 0 if any rank found an infinity."""
        if not self.may_skip:
            return None
        skip = found != 0
        if self.skip_nonfinite and grad_sq is not None:
            skip = skip | ~self.grad_norm(grad_sq).isfinite()
        return skip.to(found.dtype)


def _scalar_on(value: Tensor, device: torch.device) -> Tensor:
    return to_device(value.detach().reshape(()), device, scalar_dtype(device))


def clip_factor(grad_norm: Tensor, max_grad_norm: float) -> Tensor:
    """Returns the factor with which `torch.nn.utils.clip_grad_norm_` clips gradients, its 1e-6 included."""
    return (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
