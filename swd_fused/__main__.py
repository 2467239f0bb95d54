"""Prints what a bug report needs: versions, devices, and a self-test of each backend. Use: python -m swd_fused"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

import torch

import swd_fused
from swd_fused import self_test


def versions() -> str:
    """Returns what runs here, as one line for each layer."""
    gpu = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    gpu = f"ROCm {torch.version.hip}" if torch.version.hip else gpu
    return "\n".join(
        [
            f"swd_fused {swd_fused.__version__} in {os.path.dirname(swd_fused.__file__)}",
            f"torch     {torch.__version__} ({gpu})",
            f"triton    {version_of('triton')}",
            f"python    {platform.python_version()} on {platform.platform()}",
        ]
    )


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def devices() -> str:
    """Returns the CPU and all GPUs, as one line for each."""
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [f"cpu       {platform.machine()}, {capability}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # CUDA's builds have gcnArchName, too: there it is the device's name once more.
        architecture = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        lines.append(f"cuda:{index}    {properties.name}, {architecture}, {properties.total_memory / 2**30:.0f} GiB")
    others = [device for device in self_test.devices() if device not in ("cpu", "cuda")]
    return "\n".join(lines + others)


def main() -> int:
    """Returns the process's exit code: 1 if a backend differs from the definition, or a fused one is missing."""
    description = (
        "Prints versions, devices, and for each backend whether it is available and agrees with the definition of "
        "AdamS, written out in plain PyTorch in float64. Put the output into bug reports. Exits with 1 if a backend "
        "does not agree, or if a fused backend is missing that this machine could have: the C++ kernels for its CPU, "
        "or Triton for its CUDA or ROCm GPU."
    )
    argparse.ArgumentParser("python -m swd_fused", description=description).parse_args()
    print(versions())
    print(devices())
    results = self_test.run()
    for result in results:
        print(result)
    failed = any(result.failed for result in results)
    print("Something is wrong, see FAILED and MISSING above." if failed else "All that this machine can use works.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
