"""A CUDA or ROCm device under measurement: time on it, the bandwidth of its memory, and what a step asks of it."""

from __future__ import annotations

import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

# --- Time

# The host is ahead of the device by so many cycles, some milliseconds, when a step begins: its own work, which
# benchmarks.host_work measures, does not show as a gap between launches.
HEAD_START = 20_000_000

# Steps in a row in one measurement of the wall clock: as in training, the host may work ahead of the device.
STEPS_IN_A_ROW = 10


def timed(run: Callable[[], object]) -> float:
    """Seconds on the device, from the first launch to the end of the last."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def wall_timed(run: Callable[[], object]) -> float:
    """Seconds for one of several calls in a row until the device has done them: the host's work or the device's,
    whichever takes longer."""
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(STEPS_IN_A_ROW):
        run()
    torch.cuda.synchronize()
    return (perf_counter() - start) / STEPS_IN_A_ROW


# --- The device

# GB/s, by words of the device's name, as the vendors state them. Two of these the driver's clock and bus width would
# not tell: AMD's clock is that of commands.
PEAKS = {
    "MI300X": 5300.0,
    "MI250X": 1638.4,  # one of its two dies, which is a device
    "A100-SXM4-40GB": 1555.0,
    "A100-SXM4-80GB": 2039.0,
    "H100 80GB HBM3": 3350.0,
    "H200": 4800.0,
    "B200": 8000.0,
}


def missing() -> str | None:
    """Why nothing can be measured on a GPU here, if that is so."""
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA or ROCm GPU here."


def peak_gb_per_s(name: str, clock_khz: int | None, bus_bits: int | None) -> float | None:
    """Of the memory. Two transfers in a clock, if the device is not in the table; None if nothing is known."""
    for words, peak in PEAKS.items():
        if re.search(rf"(?<!\w){words}(?!\w)", name):  # whole words: "GH200 480GB" is no H200
            return peak
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9 if clock_khz and bus_bits else None


def peak_here() -> float | None:
    properties = torch.cuda.get_device_properties()
    clock, bus = (getattr(properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
    return peak_gb_per_s(properties.name, clock, bus)


def driver_version() -> str:
    """Returns the version of the kernel's driver, as nvidia-smi or Linux states it."""
    amd = Path("/sys/module/amdgpu/version")
    if torch.version.hip:
        return f"amdgpu {amd.read_text().strip()}" if amd.exists() else "not known: the kernel's own amdgpu"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: nvidia-smi raises {type(error).__name__}"
    return f"NVIDIA {done.stdout.split()[0]}"


# --- Kernels, copies, and waits of the host

WARM_UP_STEPS = 4


def counted(step: Callable[[], object]) -> dict[str, int]:
    """Returns the counts of one step, after some that warm up. What measuring itself does is taken off."""
    for _ in range(WARM_UP_STEPS):
        step()
    waits = waits_seen_by_torch(step)
    counts = profiled(step)
    counts.subtract(profiled(lambda: None))
    return {"kernels": counts["kernels"], "copies": counts["copies"], "waits": max(waits, counts["waits"])}


def profiled(run: Callable[[], object]) -> Counter[str]:
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return Counter(kind for event in profile.events() if (kind := kind_of(event)) is not None)


def kind_of(event: object) -> str | None:
    """Returns what an event of the profiler counts as. Those without a device type are the virtual GPU's launches."""
    name: str = getattr(event, "name", "")
    if getattr(event, "device_type", torch.autograd.DeviceType.CUDA) == torch.autograd.DeviceType.CUDA:
        return "copies" if name.startswith(("Memcpy", "Memset")) else "kernels"
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
