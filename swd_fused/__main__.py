"""Prints for bug reports versions, devices, and whether each backend agrees with plain PyTorch in float64.

Exits with 1 if a backend does not agree, or if a fused backend is missing that this machine could have: the C++ kernels
for its CPU, or Triton for its CUDA or ROCm GPU. Use: python -m swd_fused
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

import torch
from torch import Tensor

import swd_fused
from swd_fused.backends import BEST
from swd_fused.optimizer import FusedAdamS
from swd_fused.options import BackendName

SHAPES = [(1000,), (33, 17), ()]
# One value for each tensor. Gradients differ by tensor and halve from step to step, so that no wrong mean looks right.
WEIGHT_DECAYS = [2e-2, 0.0, 2e-2]
GRAD_SCALES = [0.1, 1.0, 10.0]
STEPS = 4
# Weights are below 4, so float32 stores each result to 1.2e-7 and loses up to 1e-6 in all steps. Each wrong mean in the
# tests moves weights ten times as far as this.
TOLERANCE = 2e-6


def versions_and_devices() -> list[str]:
    """Returns a line for each layer of software, for the CPU, and for each GPU."""
    gpu = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    gpu = f"ROCm {torch.version.hip}" if torch.version.hip else gpu
    triton = next((found.version for found in importlib.metadata.distributions(name="triton")), "not installed")
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [
        f"swd_fused {swd_fused.__version__} in {os.path.dirname(swd_fused.__file__)}",
        f"torch     {torch.__version__} ({gpu})",
        f"triton    {triton}",
        f"python    {platform.python_version()} on {platform.platform()}",
        f"cpu       {platform.machine()}, {capability}, {torch.get_num_threads()} threads",
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # CUDA builds have gcnArchName too, but it repeats the device's name.
        architecture = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        lines.append(f"cuda:{index}    {properties.name}, {architecture}, {properties.total_memory / 2**30:.0f} GiB")
    return lines


def new_optimizer(backend: BackendName, device: str, dtype: torch.dtype) -> FusedAdamS:
    """Returns an optimizer of random weights. Raises RuntimeError if the backend is not available."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for shape in SHAPES]
    groups = [{"params": [weight], "weight_decay": decay} for weight, decay in zip(weights, WEIGHT_DECAYS, strict=True)]
    return FusedAdamS(groups, lr=1e-2, max_grad_norm=10.0, backend=backend)


def trained(optimizer: FusedAdamS) -> list[Tensor]:
    """Returns the weights after some steps with random gradients."""
    generator, params = torch.Generator().manual_seed(1), optimizer.numbered_params()
    for step in range(STEPS):
        for param, scale in zip(params, GRAD_SCALES, strict=True):
            grad = torch.randn(param.shape, generator=generator, device="cpu") * scale / 2**step
            param.grad = grad.to(param)
        optimizer.step()
    return [param.double().cpu() for param in params]


def defined() -> list[Tensor]:
    """Returns the weights that every backend should reach: by the paper's algorithm in float64, in plain PyTorch."""
    return trained(new_optimizer("torch", "cpu", torch.float64))


def tested(backend: BackendName, device: str) -> tuple[bool, str]:
    """Returns whether a backend passes on a device, and a line for the report."""
    try:
        optimizer = new_optimizer(backend, device, torch.float32)
    except RuntimeError as missing:
        if BEST.get(device) == backend:
            return False, f"MISSING: {missing}"
        # Another backend is the best one here, so advice on how to get this one would be noise.
        return True, "not used: its kernels are for CUDA and ROCm GPUs"
    try:
        error = max(float((a - b).abs().max()) for a, b in zip(trained(optimizer), defined(), strict=True))
    except Exception as raised:  # a broken driver or compiler may raise anything, and the report shows it
        return False, f"FAILED with {type(raised).__name__}: {raised}"
    is_right = error <= TOLERANCE  # False for NaN
    said = f"largest difference {error:.1e} from plain PyTorch in float64 in {STEPS} steps"
    return is_right, f"{'ok' if is_right else 'FAILED'}, {said}"


def main() -> int:
    """Returns the process's exit code: 1 if a backend differs from the definition, or a fused one is missing."""
    argparse.ArgumentParser("python -m swd_fused", description=__doc__).parse_args()
    print(*versions_and_devices(), sep="\n")
    pairs: list[tuple[BackendName, str]] = [("cpu", "cpu"), ("triton", "cpu"), ("torch", "cpu")]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        pairs += [("triton", accelerator.type), ("torch", accelerator.type)]
    is_right = True
    for backend, device in pairs:
        agrees, found = tested(backend, device)
        print(f"{backend:<6} on {device}: {found}")
        is_right &= agrees
    print("All that this machine can use works." if is_right else "Something is wrong, see FAILED and MISSING above.")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
