"""The protocol of a backend: the kernels of a step, and how they see a bucket's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from swd_fused.core.schedule import Gate

if TYPE_CHECKING:
    from swd_fused.core.bucket import Bucket


class Plan:
    """Holds what a backend keeps of a bucket from step to step."""

    copies: Sequence[Tensor] = ()  # of tensors that kernels cannot walk, which take part in their place

    def for_capture(self) -> Plan:
        """Returns a copy for a step that is captured in a CUDA graph."""
        return self


class Backend(Protocol):
    """The two passes of a step over a bucket. Results are float64 tensors of the bucket's device.

    Tensors without a gradient take no part in a step. v^ is the second moment after bias correction. Zero-dimensional
    are `exp_avg_sq_mean`, `grad_factor`, which gradients are multiplied by, and `skip`, not 0 if nothing must be
    changed; None stands for 1 and 0.
    """

    is_capturable: bool  # whether its steps may be captured in a CUDA graph
    is_atomic: bool  # whether `step` cannot be interrupted between the updates of two tensors
    counts_writes: bool  # whether torch counts its writes to moments

    def description(self, device: torch.device) -> str:
        """Returns the backend's name for `repr`, and what is special about it on this device."""

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros in the shape and, as far as they are dense, the strides of `like`."""
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def plan(self, bucket: Bucket) -> Plan:
        """Describes checked tensors to the kernels. Raises for tensors that only a kernel can refuse."""

    def begin(self, bucket: Bucket) -> None:
        """Tells the kernels where this step's gradients are. Refuses nothing."""

    def pass1(self, bucket: Bucket) -> Tensor:
        """Returns (grad_sq, carried, fresh), see `Sums`. With amsgrad the latter two mean nothing."""

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        """Returns the sum of v^ after this step, for amsgrad, whose maxima have no recursion."""

    def carried(self, bucket: Bucket, after_this_step: bool) -> Tensor:
        """Returns (sum, weight, count) without reading gradients.

        Of v^ as it is, over tensors that have taken a step; or of the part of v^ after this step that stems from the
        steps before, over tensors with a gradient, together with the weight that evenly spread squared gradients have.
        """

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        """Advances parameters, masters, moments, `bucket.steps` and `bucket.sums`. Returns grad_sq if asked for."""

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> Tensor | None:
        """Takes both passes as one, of a bucket that is the whole model. Returns (exp_avg_sq_mean, grad_norm, skip), or
        None where the passes must be taken one by one, having done nothing."""
        return None

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        """Returns by tensor the `bucket.sums` that `pass2` leaves, bit for bit, from the stored moments."""
