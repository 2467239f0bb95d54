"""Bytes for each parameter of a model: the parameter, its gradient and the optimizer's state, measured after a step.

With --measure the memory of whole training steps on the CPU, beside peers, each setting in a process of its own. The
peak is what is alive when the step begins, parameters and state, and by how much the process then grows: Linux counts
its largest resident size (VmHWM), and starts anew when told to. So neither libraries nor compilers count, while
activations and temporaries do. Measured after two steps that are not, since state is made in the first.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.conditions import OtherLoad, conditions, write_rows
from benchmarks.small_models import SmallGPT
from benchmarks.step_times.harness import Row, table
from swd_fused import FusedAdamS

BF16, FP32 = torch.bfloat16, torch.float32
ROUNDED: dict[str, Any] = {"stochastic_rounding": True}
MASTERS: dict[str, Any] = {"master_weights": True}
HALF_MOMENT: dict[str, Any] = {"state_dtype": BF16}
CODED: dict[str, Any] = {"state_dtype": "8bit"}
RELEASED: dict[str, Any] = {"released": True, "schedule": "lagged"}

# --- After a step

NUMEL = 10**6
CHOICES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FP32, {}),
    "float32, first moment bfloat16": (FP32, HALF_MOMENT),
    "float32, amsgrad": (FP32, {"amsgrad": True}),
    "float32, average of weights": (FP32, {"ema_decay": 0.999}),
    "bfloat16": (BF16, {}),
    "bfloat16, stochastic rounding": (BF16, ROUNDED),
    "bfloat16, master weights": (BF16, MASTERS),
    "bfloat16, master weights, first moment bfloat16": (BF16, {**MASTERS, **HALF_MOMENT}),
    "bfloat16, stochastic rounding, first moment bfloat16": (BF16, {**ROUNDED, **HALF_MOMENT}),
    "float32, 8bit": (FP32, CODED),
    "bfloat16, stochastic rounding, 8bit": (BF16, {**ROUNDED, **CODED}),
    "bfloat16, master weights, 8bit": (BF16, {**MASTERS, **CODED}),
}


def bytes_per_parameter(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, float]:
    param = nn.Parameter(torch.randn(NUMEL).to(dtype))
    param.grad = torch.randn(NUMEL).to(dtype)
    optimizer = FusedAdamS([param], **options)
    optimizer.step()
    sizes = {"parameter": param.nbytes, "gradient": param.grad.nbytes, "state": state_bytes(optimizer)}
    rounded = {name: round(size / NUMEL, 2) for name, size in sizes.items()}
    return {**rounded, "all": round(sum(rounded.values()), 2)}


def state_bytes(optimizer: Optimizer) -> int:
    """Counts each memory once: step counters are views of one tensor, and quantised tensors have several inside."""
    seen: dict[int, int] = {}

    def add(values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
                add(getattr(value, name) for name in value.__tensor_flatten__()[0])
            elif isinstance(value, Tensor):
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            elif isinstance(value, dict):
                add(value.values())

    add(optimizer.state.values())
    return sum(seen.values())


# --- The peak of training steps

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
STEPS, WARM_UP_STEPS = 4, 2
SIZES = ("parameters", "gradients", "state", "peak", "first_step_peak")
# Freed memory goes back to the system at once, where malloc would keep what is below 32 MB and count as in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}

Build = Callable[[nn.Module], Optimizer]
THREADS = 2
MODEL = "gpt-100m"
SIZE = {"vocabulary": 16384, "context": 128, "width": 768, "layers": 12}


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), fused=True)


def adams(released: bool = False, **options: Any) -> Build:
    def build(model: nn.Module) -> Optimizer:
        optimizer = FusedAdamS(model.parameters(), weight_decay=1e-5, **options)
        if released:
            optimizer.release_gradients()
        return optimizer

    return build


def peer_of(package: str, **options: Any) -> Build:
    return lambda model: import_module(package).AdamW8bit(model.parameters(), **options)


SETTINGS: dict[str, Build] = {
    "float32: AdamW fused": adamw,
    "float32: FusedAdamS exact": adams(),
    "float32: FusedAdamS lagged, gradients released": adams(**RELEASED),
    "float32: FusedAdamS exact, 8bit": adams(**CODED),
    "float32: FusedAdamS lagged, 8bit, gradients released": adams(**RELEASED, **CODED),
    "float32: torchao AdamW8bit": peer_of("torchao.optim"),
    "float32: bitsandbytes AdamW8bit": peer_of("bitsandbytes.optim"),
    "bfloat16: AdamW fused, all in bfloat16": adamw,
    "bfloat16: FusedAdamS exact, master weights": adams(**MASTERS),
    "bfloat16: FusedAdamS exact, stochastic rounding": adams(**ROUNDED),
    "bfloat16: FusedAdamS lagged, stochastic rounding, gradients released": adams(**RELEASED, **ROUNDED),
    "bfloat16: FusedAdamS exact, stochastic rounding, 8bit": adams(**ROUNDED, **CODED),
    "bfloat16: FusedAdamS lagged, stochastic rounding, 8bit, gradients released": adams(**RELEASED, **ROUNDED, **CODED),
    "bfloat16: FusedAdamS lagged, master weights, 8bit, gradients released": adams(**RELEASED, **MASTERS, **CODED),
    "bfloat16: torchao AdamW8bit, stochastic rounding": peer_of("torchao.optim", bf16_stochastic_round=True),
    "bfloat16: bitsandbytes AdamW8bit": peer_of("bitsandbytes.optim"),
}


def measured_apart(setting: str) -> Row | str:
    """Measures in a fresh process. Returns why where that cannot be done."""
    with patch.dict(os.environ, MALLOC), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(measured_here, setting).result()
        except Exception as error:  # of any package, or of a process that was killed
            return f"{type(error).__name__}: {error}".splitlines()[0]


def measured_here(setting: str) -> Row:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = SmallGPT(**SIZE).to(BF16 if setting.startswith("bfloat16") else FP32)
    params = list(model.parameters())
    alive = [0]  # bytes of gradients, after each of them in each backward pass

    def count(_: Tensor) -> None:
        alive.append(sum(param.grad.nbytes for param in params if param.grad is not None))

    for param in params:
        param.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    optimizer = SETTINGS[setting](model)

    def train(batch: Tensor) -> None:
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = [model.batch(1, generator) for _ in range(STEPS)]
    growth = [growth_in(train, batch) for batch in batches]  # in the first step some optimizers compile
    parameters, state = sum(param.nbytes for param in params), state_bytes(optimizer)
    return {
        "elements": sum(param.numel() for param in params),
        "tokens": batches[0][:, 1:].numel(),
        "parameters": parameters,
        "gradients": max(alive[len(params) + 1 :]),  # not in the first step
        "state": state,
        "peak": parameters + state + max(growth[WARM_UP_STEPS:]),
        "first_step_peak": parameters + growth[0],
    }


def growth_in(train: Callable[[Tensor], None], batch: Tensor) -> int:
    """Returns by how many bytes the process has grown at most while it trained."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text(RESET_PEAK)
    before = resident("VmRSS")
    train(batch)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


# --- Commands


def measure_peaks(options: argparse.Namespace, console: Console) -> None:
    """Writes the rows after each setting, so that a run that is interrupted has not measured in vain."""
    console.print("Bytes for each parameter. Gradients: the most that are alive at once. Peaks: with temporaries.")
    path, rows = options.out / "training_memory.csv", []
    for name in SETTINGS:
        if not any(text in name for text in options.setting or [""]):
            continue
        other_load = OtherLoad()
        row = measured_apart(name)
        if isinstance(row, str):
            console.print(f"Skipped {name}: {row}", soft_wrap=True, highlight=False)
            continue
        shared = {**conditions(other_load), "threads": THREADS, "malloc": " ".join(MALLOC)}
        rows.append({"model": MODEL, "setting": name, **row, **shared})
        write_rows(path, rows)
        sizes = (f"{size.replace('_', ' ')} {row[size] / row['elements']:.2f}" for size in SIZES)
        console.print(f"{name}: {', '.join(sizes)}", soft_wrap=True, highlight=False)
    if not rows:
        raise SystemExit(f"No setting could be measured. There are: {'; '.join(SETTINGS)}")
    console.print(f"Wrote {path}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="the peak of training steps, on Linux")
    parser.add_argument("--setting", action="append", metavar="TEXT", help="for --measure; repeatable; default: all")
    out = Path("results/memory")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    console = Console()
    if options.measure:
        measure_peaks(options, console)
        return
    rows = [{"choice": name, **bytes_per_parameter(*choice)} for name, choice in CHOICES.items()]
    headings, cells = list(rows[0]), [[f"{value}" for value in row.values()] for row in rows]
    console.print(table(f"Bytes for each parameter, of {NUMEL:,}", headings, cells))
    path = options.out / "memory.csv"
    write_rows(path, [{**row, "torch": torch.__version__} for row in rows])
    console.print(f"Wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
