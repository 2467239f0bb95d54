"""Who computes: one backend for each device, chosen by name or by what is there."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from swd_fused.backends.torch_backend import TorchBackend
from swd_fused.bucket import Bucket

NAMES = ("auto", "cpu", "torch")


class Backend(Protocol):
    """The two passes of a step and what goes with them. Results are tensors of the bucket's device.

    v^ is the second moment after bias correction. `exp_avg_sq_mean` and `clip` are zero-dimensional. `step`
    checks that all tensors fit before it changes any; before the others `bucket.check` does.
    """

    name: str

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in the shape and, as far as they are dense, the strides of `like`."""

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        """Pass 1: the sum of v^ after this step as (carried, fresh), that is carried + clip^2 fresh.

        Sets `bucket.grad_sum`; without pass 1 `update` does.
        """

    def max_exp_avg_sq_sum(self, bucket: Bucket, clip: Tensor | None) -> Tensor:
        """Pass 1 of amsgrad, which has no such recursion: the sum of v^ after this step."""

    def last_exp_avg_sq_sum(self, bucket: Bucket) -> Tensor:
        """Instead of pass 1: the sum of v^ before this step, and its count, over tensors that have taken a step."""

    def update(self, bucket: Bucket, exp_avg_sq_mean: Tensor, clip: Tensor | None) -> None:
        """Pass 2: advances parameters, moments, `bucket.steps` and `bucket.sums`."""

    def step(self, bucket: Bucket, max_grad_norm: float | None, lagged: bool) -> tuple[Tensor, Tensor] | None:
        """Both passes as one, for a bucket that is alone: exp_avg_sq_mean and grad_norm. None if there is no such."""

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        """By tensor, the `sums` that `update` leaves, bit for bit, from what is stored."""


@cache
def load_cpu_backend() -> Backend | str:
    """The C++ backend, or why it is not there."""
    try:
        from swd_fused.backends.cpu_backend import CpuBackend
    except ImportError as error:
        return f"the C++ kernels are not built ({error})"
    return CpuBackend()


TORCH = TorchBackend()


@cache
def choose(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str]:
    """The backend that serves tensors of this device and (real) dtype, and how `repr` describes it."""
    if name == "torch":
        return TORCH, "torch"
    missing = _why_not_cpu(device, dtype)
    if not missing:
        backend = load_cpu_backend()
        if not isinstance(backend, str):
            return backend, "cpu"
        missing = backend
    if name == "cpu":
        raise RuntimeError(
            f'backend="cpu" cannot serve {dtype} parameters on {device}: {missing}. '
            'Use backend="auto", or reinstall swd_fused with a C++ compiler: pip install --no-build-isolation .'
        )
    return TORCH, f"torch ({missing})"


def _why_not_cpu(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cpu":
        return f"no fused kernels for {device.type} devices"
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"no fused kernels for {dtype}"
    return ""
