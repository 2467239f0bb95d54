"""Who computes: one backend for each device, chosen by name or by what is there."""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from swd_fused.backends.torch_backend import TorchBackend
from swd_fused.bucket import Bucket
from swd_fused.loss_scale import LossScale

NAMES = ("auto", "cpu", "triton", "torch")


class Backend(Protocol):
    """The two passes of a step and what goes with them. Results are tensors of the bucket's device.

    v^ is the second moment after bias correction. `exp_avg_sq_mean`, `grad_factor`, what gradients are multiplied by,
    and `skip`, not 0 if nothing must be changed, are zero-dimensional; None is 1 and 0. `step` checks that all tensors
    fit before it changes any; before the others `bucket.check` does.
    """

    is_capturable: bool  # whether its steps may be captured in a CUDA graph

    def description(self, device: torch.device) -> str:
        """For `repr`: the backend's name, and what is special about it on this device."""

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in the shape and, as far as they are dense, the strides of `like`."""

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        """Pass 1: the sum of v^ after this step as (carried, fresh), that is carried + grad_factor^2 fresh.

        Sets `bucket.grad_sum`; without pass 1 `update` does.
        """

    def carried_sum(self, bucket: Bucket) -> Tensor:
        """The first of these by itself, which needs no gradients."""

    def max_exp_avg_sq_sum(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        """Pass 1 of amsgrad, which has no such recursion: the sum of v^ after this step."""

    def last_exp_avg_sq_sum(self, bucket: Bucket) -> Tensor:
        """Instead of pass 1: the sum of v^ before this step, and its count, over tensors that have taken a step."""

    def update(self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None) -> None:
        """Pass 2: advances parameters, masters, moments, `bucket.steps` and `bucket.sums`."""

    def step(
        self, bucket: Bucket, max_grad_norm: float | None, lagged: bool, loss_scale: LossScale
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Both passes as one, for a bucket that is alone: exp_avg_sq_mean, grad_norm, skip. None if it cannot."""

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


@cache
def load_triton_backend() -> Backend | str:
    """The Triton backend, or why it is not there."""
    try:
        from swd_fused.backends.triton.backend import TritonBackend
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return TritonBackend()


TORCH = TorchBackend()
BEST = {"cpu": "cpu", "cuda": "triton"}
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HOW_TO_GET = {
    "cpu": "reinstall swd_fused with a C++ compiler: pip install --no-build-isolation .",
    "triton": "use a CUDA or ROCm build of torch, which brings Triton, with a C compiler (gcc, clang or $CC), which "
    "Triton needs, and move the model to the GPU.",
}


def choose(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str]:
    """The backend that serves tensors of this device and (real) dtype, and how `repr` describes it."""
    backend, why = _chosen(name, device, dtype)
    return backend, why or backend.description(device)


@cache
def _chosen(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str | None]:
    """With a description where it is not the backend's own."""
    if name == "torch":
        return TORCH, None
    if name == "auto" and device.type not in BEST:
        return TORCH, f"torch (no fused kernels for {device.type} devices)"
    found = _fused(BEST[device.type] if name == "auto" else name, device, dtype)
    if not isinstance(found, str):
        return found, None
    if name != "auto":
        raise RuntimeError(
            f'backend="{name}" cannot serve {dtype} parameters on {device}: {found}. '
            f'Use backend="auto", or {HOW_TO_GET[name]}'
        )
    return TORCH, f"torch ({found})"


def _fused(name: str, device: torch.device, dtype: torch.dtype) -> Backend | str:
    """A fused backend, or why it cannot serve."""
    if dtype not in FUSED_DTYPES:
        return f"no fused kernels for {dtype}"
    if name == "cpu":
        return f"no C++ kernels for {device.type} devices" if device.type != "cpu" else load_cpu_backend()
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"no Triton kernels for {device.type} devices (but with TRITON_INTERPRET=1, slowly, for the CPU's)"
    found = load_triton_backend()
    if isinstance(found, str):
        return found
    from swd_fused.backends.triton.launch import why_not_launchable

    return why_not_launchable(device) or found
