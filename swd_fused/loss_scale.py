"""Scaled gradients, and steps that must not be taken: what torch.amp.GradScaler and `skip_nonfinite` ask for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.schedule import scalar_dtype
from swd_fused.upload import moved


class LossScale(NamedTuple):
    """`grad_scale` and `found_inf` are tensors of one float32 that GradScaler sets for a step."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    skip_nonfinite: bool = False

    @property
    def may_skip(self) -> bool:
        return self.found_inf is not None or self.skip_nonfinite

    def on(self, device: torch.device) -> LossScale:
        """As kernels read it: GradScaler's device need not be that of the parameters."""
        if self.grad_scale is None and self.found_inf is None:
            return self
        scale, found = (None if value is None else moved(value.detach(), device, torch.float32) for value in self[:2])
        return LossScale(scale, found, self.skip_nonfinite)

    def unscale(self, device: torch.device) -> Tensor | None:
        """What gradients are to be multiplied by."""
        return None if self.grad_scale is None else _at(self.grad_scale, device).reciprocal()

    def found(self, device: torch.device) -> Tensor:
        """1 if there was an infinity, else 0."""
        if self.found_inf is None:
            return torch.zeros((), dtype=scalar_dtype(device), device=device)
        return (_at(self.found_inf, device) != 0).to(scalar_dtype(device))

    def skip(self, found: Tensor, grad_norm: Tensor | None) -> Tensor | None:
        """1 if the step must change nothing, by what all ranks have found."""
        if not self.may_skip:
            return None
        skip = found != 0
        if self.skip_nonfinite and grad_norm is not None:
            skip = skip | ~grad_norm.isfinite()
        return skip.to(found.dtype)


def _at(value: Tensor, device: torch.device) -> Tensor:
    return moved(value.detach().reshape(()), device, scalar_dtype(device))
