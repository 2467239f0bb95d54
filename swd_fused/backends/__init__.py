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
    """The two passes of a step and what goes with them. Sums come by tensor, in the scalars' dtype.

    A gradient that does not fit its parameter makes either pass raise before anything is changed.
    `scalars` has a row for each tensor: grad_scale, beta1, beta2, bias_correction2, eps, decay_factor, step_size.
    """

    name: str

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in the shape and, as far as they are dense, the strides of `like`."""

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        """Pass 1: sum of grad^2."""

    def max_exp_avg_sq_sums(self, bucket: Bucket, scalars: Tensor) -> Tensor:
        """Pass 1 of amsgrad: sum of max_exp_avg_sq as this step will leave it."""

    def update(self, bucket: Bucket, scalars: Tensor) -> tuple[Tensor, Tensor]:
        """Pass 2: changes parameters and moments; the sums of bucket.averaged and of grad^2."""

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        """The sums that `update` gave, bit for bit, from what is stored."""


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
