"""Time of an optimizer's step in mixed precision, on GPT-2 124M's shapes, and beside DeepSpeed's optimizer for the CPU.

float32, without and with clipping, and with each kind of decay; bfloat16 parameters and gradients with masters;
and float16 with a GradScaler. In each the contenders take turns. DeepSpeedCPUAdam takes part where it is installed and
builds. It computes AdamW, as does FusedAdamS with decay="decoupled".
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import positive
from benchmarks.conditions import conditions, write_rows
from benchmarks.contenders import MAX_GRAD_NORM, SCHEDULED_WEIGHT_DECAY, Build, Step, parameters, with_clipping
from benchmarks.other_load import OtherLoad, warn_of_other_load
from benchmarks.suites import SUITES
from benchmarks.timing import WARM_UP_ROUNDS, Quartiles, interleaved_times, milliseconds
from swd_fused import FusedAdamS

Row = dict[str, Any]

SCALE = 1024.0
QUICK = "one-100k", 3  # suite and repeats


def fused_adams(**options: Any) -> Build:
    return lambda params: FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY, **options).step


def with_masters(build: Build) -> Build:
    """What an optimizer without masters of its own needs: gradients widened before it, parameters narrowed after."""

    def build_with_masters(params: Sequence[Tensor]) -> Step:
        masters = [torch.nn.Parameter(param.detach().float()) for param in params]
        for master in masters:
            master.grad = torch.empty_like(master)
        wide_grads = [master.grad for master in masters]
        step = build(masters)

        def copy_step_copy() -> None:
            torch._foreach_copy_(wide_grads, [param.grad for param in params])
            step()
            with torch.no_grad():
                torch._foreach_copy_(list(params), masters)

        return copy_step_copy

    return build_with_masters


def with_scaler(build: Callable[[Sequence[Tensor]], torch.optim.Optimizer]) -> Build:
    def build_with_scaler(params: Sequence[Tensor]) -> Step:
        optimizer = build(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
        scaler.scale(torch.zeros(()))  # makes the scale

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        return step

    return build_with_scaler


def adamw(params: Sequence[Tensor]) -> Step:
    return torch.optim.AdamW(params, fused=True).step


def deepspeed_cpu_adam() -> Build | str:
    """DeepSpeed's, or why it is not there. Building it takes more than a minute, once."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever goes wrong in a foreign build
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return lambda params: DeepSpeedCPUAdam(list(params), adamw_mode=True).step


def settings() -> dict[str, tuple[torch.dtype, dict[str, Build]]]:
    """By setting, the dtype of parameters and gradients and the contenders, torch's best first."""
    result: dict[str, tuple[torch.dtype, dict[str, Build]]] = {
        "float32": (
            torch.float32,
            {
                "AdamW fused": adamw,
                "FusedAdamS exact": fused_adams(),
                "FusedAdamS lagged": fused_adams(schedule="lagged"),
                "FusedAdamS decoupled": fused_adams(decay="decoupled"),
            },
        ),
        "kinds of decay, float32": (
            torch.float32,
            {
                "FusedAdamS exact": fused_adams(),
                "the same, corrected": fused_adams(corrected_decay=True),
                "the same, cautious": fused_adams(cautious_decay=True),
                "FusedAdamS decoupled": fused_adams(decay="decoupled"),
                "the same, corrected (AdamC)": fused_adams(decay="decoupled", corrected_decay=True),
                "the same, cautious (AdamW)": fused_adams(decay="decoupled", cautious_decay=True),
                "FusedAdamS independent": fused_adams(decay="independent"),
            },
        ),
        "float32 with clipping": (
            torch.float32,
            {
                "AdamW fused + clip_grad_norm_": with_clipping(adamw),
                "FusedAdamS exact": fused_adams(max_grad_norm=MAX_GRAD_NORM),
            },
        ),
        "bfloat16 with masters": (
            torch.bfloat16,
            {
                "AdamW fused on float32 copies": with_masters(adamw),
                "FusedAdamS exact": fused_adams(master_weights=True),
                "FusedAdamS lagged": fused_adams(master_weights=True, schedule="lagged"),
            },
        ),
        "float16 with GradScaler": (
            torch.float16,
            {
                "AdamW fused": with_scaler(lambda params: torch.optim.AdamW(params, fused=True)),
                "FusedAdamS exact": with_scaler(lambda params: FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY)),
            },
        ),
    }
    deepspeed = deepspeed_cpu_adam()
    if not isinstance(deepspeed, str):
        result["float32"][1]["DeepSpeedCPUAdam"] = deepspeed
        result["float32 with clipping"][1]["DeepSpeedCPUAdam + clip_grad_norm_"] = with_clipping(deepspeed)
        result["bfloat16 with masters"][1]["DeepSpeedCPUAdam on float32 copies"] = with_masters(deepspeed)
    return result


def converted(params: Sequence[Tensor], dtype: torch.dtype, scale: float) -> list[Tensor]:
    result = [torch.nn.Parameter(param.detach().to(dtype)) for param in params]
    for param, given in zip(result, params, strict=True):
        assert given.grad is not None
        param.grad = given.grad.mul_(scale).to(dtype)
    return list(result)


def measure(setting: str, suite: str, repeats: int, progress: Progress) -> list[Row]:
    dtype, contenders = settings()[setting]
    scale = SCALE if "GradScaler" in setting else 1.0
    # Each has parameters of its own: masters follow parameters that others write to, which takes longer than a step.
    steps = [build(converted(parameters(SUITES[suite].shapes), dtype, scale)) for build in contenders.values()]
    task = progress.add_task(setting, total=repeats + WARM_UP_ROUNDS)
    other_load = OtherLoad()
    times = interleaved_times(steps, repeats, on_round=lambda: progress.advance(task))
    seconds = {name: Quartiles.of(values) for name, values in zip(contenders, times, strict=True)}
    peer = next(iter(contenders))
    shared = conditions(other_load)
    return [
        {
            "setting": setting,
            "suite": suite,
            "contender": name,
            "repeats": repeats,
            "median_s": quartiles.median,
            "q1_s": quartiles.q1,
            "q3_s": quartiles.q3,
            "ratio": quartiles.median / seconds[peer].median,
            "peer": peer,
            **shared,
        }
        for name, quartiles in seconds.items()
    ]


def table(rows: Sequence[Row]) -> Table:
    title = f"{rows[0]['setting']}, {rows[0]['suite']}, {rows[0]['repeats']} repeats"
    result = Table(title=title, caption=f"ratio: to {rows[0]['peer']}", title_justify="left", box=SIMPLE_HEAD)
    result.add_column("contender", no_wrap=True)
    for heading in ("median ms", "quartiles ms", "ratio"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        median, q1, q3 = (milliseconds(row[key]) for key in ("median_s", "q1_s", "q3_s"))
        result.add_row(str(row["contender"]), median, f"{q1} - {q3}", f"{row['ratio']:.2f}")
    return result


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.mixed_precision", description=__doc__)
    result.add_argument("--suite", choices=list(SUITES), default="gpt2-124m", help="default: %(default)s")
    result.add_argument("--repeats", type=positive, default=15, help="default: %(default)s")
    result.add_argument("--setting", default="", metavar="TEXT", help="only settings whose names contain it")
    result.add_argument("--quick", action="store_true", help="small tensors and few repeats: does everything run?")
    result.add_argument("--threads", type=positive, default=2, help="default: %(default)s")
    result.add_argument(
        "--out", type=Path, default=Path("results/mixed_precision"), metavar="DIR", help="default: %(default)s"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if not any(options.setting in name for name in settings()):
        parser().error(f"no setting's name contains {options.setting!r}: {'; '.join(settings())}")
    torch.set_num_threads(options.threads)
    console = Console()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        suite, repeats = QUICK if options.quick else (options.suite, options.repeats)
        for setting in (name for name in settings() if options.setting in name):
            setting_rows = measure(setting, suite, repeats, progress)
            progress.console.print(table(setting_rows))
            warn_of_other_load(console, setting_rows[0]["other_load"])
            rows += setting_rows
            gc.collect()  # optimizers are in reference cycles, and the next setting needs their memory
    missing = deepspeed_cpu_adam()
    if isinstance(missing, str):
        console.print(f"Without DeepSpeedCPUAdam ({missing}). To compare: pip install deepspeed")
    path = options.out / "mixed_precision.csv"
    write_rows(path, rows)
    console.print(f"Wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
