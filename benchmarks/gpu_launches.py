"""Counts what a steady step asks of a GPU: kernels, copies, and waits of the host. Nothing is timed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import torch

WARM_UP_STEPS = 4
COPIES = ("Memcpy", "Memset")


def counted(step: Callable[[], object]) -> dict[str, int]:
    """Returns the counts of one step, after some that warm up. What measuring itself does is taken off."""
    for _ in range(WARM_UP_STEPS):
        step()
    waits = waits_seen_by_torch(step)
    counts = profiled(step)
    counts.subtract(profiled(lambda: None))
    return {
        "kernels": counts["kernels"],
        "copies": counts["copies"],
        "waits": max(waits, counts["waits"]),
    }


def profiled(run: Callable[[], object]) -> Counter[str]:
    """Returns how many kernels and copies ran on the device, and how often the host called a function that waits."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return Counter(kind for event in profile.events() if (kind := kind_of(event)) is not None)


def kind_of(event: object) -> str | None:
    """Returns what an event of the profiler counts as. Those without a device type are the virtual GPU's launches."""
    name: str = getattr(event, "name", "")
    on_device = getattr(event, "device_type", torch.autograd.DeviceType.CUDA) == torch.autograd.DeviceType.CUDA
    if on_device:
        return "copies" if name.startswith(COPIES) else "kernels"
    return "waits" if name.startswith(("cuda", "cu", "hip")) and "Synchronize" in name else None


def waits_seen_by_torch(step: Callable[[], object]) -> int:
    """Returns how many operations of torch made the host wait, which torch warns of if asked to."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
