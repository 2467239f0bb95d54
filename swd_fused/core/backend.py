"""The protocol of a backend: the kernels of a step, and the plan by which they find a bucket's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from swd_fused.core.schedule import Gate

if TYPE_CHECKING:
    from swd_fused.core.bucket import Bucket


class Plan:
    """Holds what a backend remembers about a bucket from step to step."""

    copies: Sequence[Tensor] = ()  # kernels work on these copies in place of tensors that they cannot walk

    def for_capture(self) -> Plan:
        """Returns a copy for a step that is captured in a CUDA graph."""
        return self


class Backend(Protocol):
    """Runs the two passes of a step over a bucket. Results are float64 tensors on the bucket's device.

    Tensors without a gradient take no part in a step. v^ is the second moment after bias correction. `exp_avg_sq_mean`,
    `grad_factor` and `skip` are zero-dimensional. Gradients are multiplied by `grad_factor`; None stands for 1. The
    step changes nothing if `skip` is not 0; None stands for 0.
    """

    is_capturable: bool  # whether its steps may be captured in a CUDA graph
    is_atomic: bool  # whether Ctrl-C cannot interrupt `step` between the updates of two tensors
    counts_writes: bool  # whether torch counts its writes to moments

    def description(self, device: torch.device) -> str:
        """Returns the backend's name for `repr`, with any peculiarity on this device."""

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros in the shape of `like`, and in its strides if these are dense."""
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def plan(self, bucket: Bucket) -> Plan:
        """Describes checked tensors to the kernels. Raises for tensors that this backend cannot step."""

    def begin(self, bucket: Bucket) -> None:
        """Tells the kernels where this step's gradients are. Never raises for a tensor."""

    def pass1(self, bucket: Bucket) -> Tensor:
        """Returns (grad_sq, carried, fresh), see `Sums`. With amsgrad only grad_sq is meaningful."""

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        """Returns the sum of v^ after this step, for amsgrad, whose maxima have no recursion."""

    def weighted_sum(self, bucket: Bucket, weights: Tensor) -> Tensor:
        """Returns the sum of second moments, each tensor's times its weight. A weight of 0 leaves a tensor out."""
        return torch.where(weights > 0, weights * bucket.known_sums(), 0.0).sum()

    def last_sum(self, bucket: Bucket) -> Tensor:
        """Returns the sum of v^ before this step over tensors that have taken a step, and their number of elements."""

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        """Updates parameters, masters, moments, `bucket.steps` and `bucket.sums`. Returns grad_sq if `sum_grads`."""

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> Tensor | None:
        """Runs both passes in one call, for a bucket that is the whole model. Returns (exp_avg_sq_mean, grad_norm,
        skip). Returns None, having done nothing, where the passes must run one by one."""
        return None

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        """Rebuilds `bucket.sums`, a number for each tensor, from stored moments: bit for bit as `pass2` leaves it."""
