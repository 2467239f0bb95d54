"""Memory of a training step on the CPU, each setting in a process of its own: parameters, gradients, state, and peak.

The peak is what is alive when the step begins, parameters and state, and by how much the process then grows: Linux
counts its largest resident size (VmHWM), and starts anew when told to. So neither libraries nor compilers count, while
activations and temporaries do. Measured after two steps that are not, since state is made in the first.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.small_models import SmallGPT
from swd_fused import FusedAdamS

Row = dict[str, Any]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)

# Freed memory goes back to the system at once, where malloc would keep what is below 32 MB and count as in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}


@dataclass(frozen=True)
class MeasuredModel:
    build: Callable[[], SmallGPT]
    batch_size: int


MODELS = {
    "gpt-100m": MeasuredModel(lambda: SmallGPT(vocabulary=16384, context=128, width=768, layers=12), batch_size=1),
    "tiny": MeasuredModel(lambda: SmallGPT(vocabulary=512, context=16, width=64, layers=2), batch_size=2),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def adams(release: bool = False, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = FusedAdamS(model.parameters(), weight_decay=1e-5, **options)
        if release:
            optimizer.release_gradients()
        return optimizer

    return build


def torchao(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters(), **options)
        return optimizer

    return build


def bitsandbytes(model: nn.Module) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters())
    return optimizer


def flashoptim(model: nn.Module) -> torch.optim.Optimizer:
    import flashoptim

    optimizer: torch.optim.Optimizer = flashoptim.FlashAdamW(model.parameters())
    flashoptim.enable_gradient_release(model, optimizer)
    return optimizer


@dataclass(frozen=True)
class Setting:
    name: str
    dtype: torch.dtype
    build: Callable[[nn.Module], torch.optim.Optimizer]


ROUNDED: dict[str, Any] = {"stochastic_rounding": True}
LAGGED: dict[str, Any] = {"schedule": "lagged"}
EIGHT_BIT: dict[str, Any] = {"state_dtype": "8bit"}

SETTINGS = [
    Setting("float32: AdamW fused", torch.float32, adamw),
    Setting("float32: FusedAdamS exact", torch.float32, adams()),
    Setting("float32: FusedAdamS lagged, gradients released", torch.float32, adams(release=True, **LAGGED)),
    Setting("float32: FusedAdamS exact, 8bit", torch.float32, adams(**EIGHT_BIT)),
    Setting("float32: FusedAdamS lagged, 8bit, gradients released", torch.float32, adams(True, **LAGGED, **EIGHT_BIT)),
    Setting("float32: torchao AdamW8bit", torch.float32, torchao()),
    Setting("float32: bitsandbytes AdamW8bit", torch.float32, bitsandbytes),
    Setting("bfloat16: AdamW fused, all in bfloat16", torch.bfloat16, adamw),
    Setting("bfloat16: FusedAdamS exact, master weights", torch.bfloat16, adams(master_weights=True)),
    Setting("bfloat16: FusedAdamS exact, stochastic rounding", torch.bfloat16, adams(**ROUNDED)),
    Setting(
        "bfloat16: FusedAdamS lagged, stochastic rounding, gradients released",
        torch.bfloat16,
        adams(release=True, **LAGGED, **ROUNDED),
    ),
    Setting("bfloat16: FusedAdamS exact, stochastic rounding, 8bit", torch.bfloat16, adams(**ROUNDED, **EIGHT_BIT)),
    Setting(
        "bfloat16: FusedAdamS lagged, stochastic rounding, 8bit, gradients released",
        torch.bfloat16,
        adams(release=True, **LAGGED, **ROUNDED, **EIGHT_BIT),
    ),
    # FlashOptim's choice of precision, but for 24 bits of its masters: its own kernels need a GPU.
    Setting(
        "bfloat16: FusedAdamS lagged, master weights, 8bit, gradients released",
        torch.bfloat16,
        adams(release=True, master_weights=True, **LAGGED, **EIGHT_BIT),
    ),
    Setting("bfloat16: torchao AdamW8bit, stochastic rounding", torch.bfloat16, torchao(bf16_stochastic_round=True)),
    Setting("bfloat16: bitsandbytes AdamW8bit", torch.bfloat16, bitsandbytes),
    Setting("bfloat16: FlashAdamW, gradients released", torch.bfloat16, flashoptim),
]


def measured(setting: str, model: str, threads: int) -> Row | str:
    """Measures in a fresh process. Returns why where that cannot be done."""
    command = [sys.executable, "-m", "benchmarks.training_memory", setting, model, str(threads)]
    ran = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True, check=False)
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {ran.returncode}"
    row: Row = json.loads(ran.stdout.splitlines()[-1])
    return row


def measure_here(setting: Setting, measured_model: MeasuredModel) -> Row:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = measured_model.build().to(setting.dtype)
    batches = [model.batch(measured_model.batch_size, generator) for _ in range(4)]
    most_gradients = MostGradients(model)
    optimizer = setting.build(model)
    # The first step makes the state, and some optimizers compile in it.
    growth = [growth_in(lambda batch=batch: train(model, optimizer, batch)) for batch in batches]  # type: ignore[misc]
    parameters = sum(param.nbytes for param in model.parameters())
    state = state_bytes(optimizer)
    return {
        "elements": sum(param.numel() for param in model.parameters()),
        "tokens": batches[0][:, 1:].numel(),
        "parameters": parameters,
        "gradients": most_gradients.bytes,
        "state": state,
        "peak": parameters + state + max(growth[2:]),
        "first_step_peak": parameters + growth[0],
    }


def train(model: SmallGPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model.loss(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


class MostGradients:
    """Counts the gradients that are alive at once, in each backward pass after the first."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._params = list(model.parameters())
        self._calls = 0
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]

    def _count(self, _: torch.Tensor) -> None:
        self._calls += 1
        if self._calls > len(self._params):
            alive = sum(param.grad.nbytes for param in self._params if param.grad is not None)
            self.bytes = max(self.bytes, alive)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Counts each memory once: step counters are views of one tensor, and quantised tensors have several inside."""
    seen: dict[int, int] = {}

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))
        elif isinstance(value, torch.Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for each in value.values():
                add(each)

    for state in optimizer.state.values():
        add(state)
    return sum(seen.values())


def growth_in(function: Callable[[], object]) -> int:
    """Returns by how many bytes the process has grown at most while the function ran."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text(RESET_PEAK)
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_memory", description=__doc__)
    parser.add_argument("setting", choices=[setting.name for setting in SETTINGS])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("threads", type=int)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    setting = next(setting for setting in SETTINGS if setting.name == options.setting)
    print(json.dumps(measure_here(setting, MODELS[options.model])))


if __name__ == "__main__":
    main()
