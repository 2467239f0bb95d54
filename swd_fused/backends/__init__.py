"""Chooses the backend for each parameter."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from swd_fused.backends.torch_backend import TorchBackend
from swd_fused.core.backend import Backend
from swd_fused.devices.transfer import is_fake
from swd_fused.options import Options
from swd_fused.user_warning import warn_user


@cache
def load_cpu_backend() -> Backend | str:
    """Returns the C++ backend, or why it is missing."""
    try:
        from swd_fused.backends.cpu_backend import CpuBackend
    except ImportError as error:
        return f"the C++ kernels are not built ({error})"
    return CpuBackend()


@cache
def load_triton_backend() -> Backend | str:
    """Returns the Triton backend, or why it is missing."""
    try:
        from swd_fused.backends.triton.backend import TritonBackend
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return TritonBackend()


TORCH = TorchBackend()
BEST = {"cpu": "cpu", "cuda": "triton"}
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ROOT = Path(__file__).parents[2]
HOW_TO_GET = {
    "triton": "use a CUDA or ROCm build of torch, which brings Triton, with a C compiler (gcc, clang or $CC), which "
    "Triton needs, and move the model to the GPU.",
    "cpu": "run `pip install .` in a clone of swd_fused, with a C++ compiler and without SWD_FUSED_NO_CPP. This "
    f"package is in {ROOT}: if that is a clone, run `pip install -e .` there, or start Python elsewhere.",
}


def choose(param: Tensor, options: Options) -> Backend:
    """Returns the backend that steps a parameter."""
    return _chosen(_name_for(param, options), param.device, param.dtype.to_real())[0]


def describe(param: Tensor, options: Options) -> str:
    """Returns how `repr` describes the backend that steps a parameter."""
    backend, why = _chosen(_name_for(param, options), param.device, param.dtype.to_real())
    return f"torch ({why})" if why else backend.description(param.device)


def _name_for(param: Tensor, options: Options) -> str:
    # Fake tensors have no memory for kernels, but torch's own operations can trace their results.
    return "torch" if is_fake(param) and not param.is_meta else options.backend


@cache
def _chosen(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str | None]:
    """Returns the backend, and if "auto" fell back on plain PyTorch the reason."""
    if name == "torch":
        return TORCH, None
    if name == "auto" and device.type not in BEST:
        return TORCH, f"no fused kernels for {device.type} devices"
    fused = BEST[device.type] if name == "auto" else name
    found = _fused(fused, device, dtype)
    if not isinstance(found, str):
        return found, None
    if name != "auto":
        raise RuntimeError(
            f'backend="{name}" cannot serve {dtype} parameters on {device}: {found}. '
            f'Use backend="auto", or {HOW_TO_GET[name]}'
        )
    if dtype in FUSED_DTYPES:
        warn_user(
            f"FusedAdamS runs on its plain PyTorch backend, which is slower: {found}. To get the fused kernels, "
            f'{HOW_TO_GET[fused]} backend="torch" asks for this one, without a warning.',
        )
    return TORCH, found


def _fused(name: str, device: torch.device, dtype: torch.dtype) -> Backend | str:
    """Returns a fused backend, or why it cannot step such parameters."""
    if dtype not in FUSED_DTYPES:
        return f"no fused kernels for {dtype}"
    if name == "cpu":
        return load_cpu_backend() if device.type == "cpu" else f"no C++ kernels for {device.type} devices"
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"no Triton kernels for {device.type} devices (but with TRITON_INTERPRET=1, slowly, for the CPU's)"
    found = load_triton_backend()
    if isinstance(found, str):
        return found
    from swd_fused.backends.triton.launch import why_not_launchable

    return why_not_launchable(device) or found
