"""The protocol of a backend, and the choice of one for each device."""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from swd_fused import source_tree
from swd_fused.backends.torch_backend import TorchBackend
from swd_fused.backends.torch_sums import sums_of_squares as sums_of_squares  # for those who have no bucket
from swd_fused.schedule import Gate
from swd_fused.tensors.bucket import Bucket
from swd_fused.user_warning import warn_user


class Backend(Protocol):
    """The two passes of a step over a bucket. Results are float64 tensors of the bucket's device.

    Tensors without a gradient take no part in a step. v^ is the second moment after bias correction. Zero-dimensional
    are `exp_avg_sq_mean`, `grad_factor`, which gradients are multiplied by, and `skip`, not 0 if nothing must be
    changed; None stands for 1 and 0.
    """

    is_capturable: bool  # whether its steps may be captured in a CUDA graph
    is_atomic: bool  # whether `step` cannot be interrupted between the updates of two tensors

    def description(self, device: torch.device) -> str:
        """Returns the backend's name for `repr`, and what is special about it on this device."""

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros in the shape and, as far as they are dense, the strides of `like`."""

    def describe(self, bucket: Bucket) -> None:
        """Describes checked tensors to the kernels, in `bucket.plan`. Raises what only a kernel can refuse."""

    def begin(self, bucket: Bucket) -> None:
        """Tells the kernels where this step's gradients are. Refuses nothing."""

    def pass1(self, bucket: Bucket) -> Tensor:
        """Returns (grad_sq, carried, fresh), see `Sums`. With amsgrad the latter two mean nothing."""

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        """Returns the sum of v^ after this step, for amsgrad, whose maxima have no recursion."""

    def carried(self, bucket: Bucket, after_this_step: bool) -> Tensor:
        """Returns (sum, weight, count) without reading gradients.

        Of v^ as it is, over tensors that have taken a step; or of what v^ after this step has of the steps before, over
        tensors with a gradient, together with the weight that evenly spread squared gradients have in it.
        """

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        """Advances parameters, masters, moments, `bucket.steps` and `bucket.sums`. Returns grad_sq if asked for."""

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> Tensor | None:
        """Takes both passes as one, of a bucket that is the whole model. Returns (exp_avg_sq_mean, grad_norm, skip), or
        None where the passes must be taken one by one, having done nothing."""

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        """Returns by tensor the `bucket.sums` that `pass2` leaves, bit for bit, from what is stored."""


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
HOW_TO_GET_TRITON = (
    "use a CUDA or ROCm build of torch, which brings Triton, with a C compiler (gcc, clang or $CC), which "
    "Triton needs, and move the model to the GPU."
)


def choose(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str]:
    """The backend that serves tensors of this device and (real) dtype, and how `repr` describes it."""
    backend, why = _chosen(name, device, dtype)
    return backend, why or backend.description(device)


@cache
def _chosen(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str | None]:
    """Returns the backend, and a description where it is not the backend's own."""
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
            f'Use backend="auto", or {_how_to_get(name)}'
        )
    if dtype in FUSED_DTYPES:
        warn_user(
            f"FusedAdamS runs on its plain PyTorch backend, which is slower: {found}. To get the fused kernels, "
            f'{_how_to_get(BEST[device.type])} backend="torch" asks for this one, without a warning.',
        )
    return TORCH, f"torch ({found})"


def _how_to_get(name: str) -> str:
    return source_tree.how_to_get_kernels() if name == "cpu" else HOW_TO_GET_TRITON


def _fused(name: str, device: torch.device, dtype: torch.dtype) -> Backend | str:
    """Returns a fused backend, or why it cannot serve."""
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
