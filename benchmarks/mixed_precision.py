"""Time of an optimizer's step in mixed precision, on GPT-2 124M's shapes, and beside DeepSpeed's optimizer for the CPU.

float32, without and with clipping, and with each kind of decay; bfloat16 parameters and gradients with masters; float16
with a GradScaler. In each setting the contenders take turns. DeepSpeedCPUAdam takes part where it is installed and
builds. It computes AdamW, as does FusedAdamS with decay="decoupled".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.step_times.contenders import (
    MAX_GRAD_NORM,
    PEER,
    SCHEDULED_WEIGHT_DECAY,
    Build,
    Step,
    adamw,
    fused_adams,
    parameters,
    with_clipping,
)
from benchmarks.step_times.harness import Case, Row, carry_out, command, grouped, times_table
from benchmarks.step_times.suites import SUITES
from swd_fused import FusedAdamS

SCALE = 1024.0
QUICK = "one-100k", 3  # suite and repeats
DEEPSPEED = "DeepSpeedCPUAdam"


def with_masters(build: Build) -> Build:
    """Wraps an optimizer without masters of its own: gradients are widened before it, parameters narrowed after."""

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


def scaled(optimizer: torch.optim.Optimizer) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
    scaler.scale(torch.zeros(()))  # makes the scale

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def deepspeed_cpu_adam() -> Build | str:
    """Returns DeepSpeed's, or why it is not there. Building it takes more than a minute, once."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever goes wrong in a foreign build
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return lambda params: DeepSpeedCPUAdam(list(params), adamw_mode=True).step


# The dtype of parameters and gradients by setting, and the contenders, torch's best first.
SETTINGS: dict[str, tuple[torch.dtype, dict[str, Build]]] = {
    "float32": (
        torch.float32,
        {
            PEER: adamw,
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
            f"{PEER} + clip_grad_norm_": with_clipping(adamw),
            "FusedAdamS exact": fused_adams(max_grad_norm=MAX_GRAD_NORM),
        },
    ),
    "bfloat16 with masters": (
        torch.bfloat16,
        {
            f"{PEER} on float32 copies": with_masters(adamw),
            "FusedAdamS exact": fused_adams(master_weights=True),
            "FusedAdamS lagged": fused_adams(master_weights=True, schedule="lagged"),
        },
    ),
    "float16 with GradScaler": (
        torch.float16,
        {
            PEER: lambda params: scaled(torch.optim.AdamW(params, fused=True)),
            "FusedAdamS exact": lambda params: scaled(FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY)),
        },
    ),
}


def with_deepspeed(setting: str, adam: Build) -> dict[str, Build]:
    return {
        "float32": {DEEPSPEED: adam},
        "float32 with clipping": {f"{DEEPSPEED} + clip_grad_norm_": with_clipping(adam)},
        "bfloat16 with masters": {f"{DEEPSPEED} on float32 copies": with_masters(adam)},
    }.get(setting, {})


def converted(params: Sequence[Tensor], dtype: torch.dtype, scale: float) -> list[Tensor]:
    result = [torch.nn.Parameter(param.detach().to(dtype)) for param in params]
    for param, given in zip(result, params, strict=True):
        assert given.grad is not None
        param.grad = given.grad.mul_(scale).to(dtype)
    return list(result)


def case_of(setting: str, suite: str, repeats: int, deepspeed: Build | str) -> Case:
    dtype, builds = SETTINGS[setting]
    if not isinstance(deepspeed, str):
        builds = {**builds, **with_deepspeed(setting, deepspeed)}
    scale = SCALE if "GradScaler" in setting else 1.0

    def build() -> Mapping[str, Step]:
        # Each has parameters of its own: masters follow those that others write to, which takes longer than a step.
        return {name: make(converted(parameters(SUITES[suite].shapes), dtype, scale)) for name, make in builds.items()}

    return Case(setting, {"setting": setting, "suite": suite}, build, repeats)


def tables(rows: Sequence[Row]) -> list[Table]:
    return [
        times_table(own, f"{own[0]['setting']}, {own[0]['suite']}", f"ratio: to {own[0]['peer']}")
        for own in grouped(rows, "setting")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("mixed_precision", __doc__, repeats=15)
    parser.add_argument("--suite", choices=list(SUITES), default="gpt2-124m", help="default: %(default)s")
    parser.add_argument("--setting", default="", metavar="TEXT", help="only settings whose names contain it")
    parser.add_argument("--quick", action="store_true", help="small tensors and few repeats: does everything run?")
    options = parser.parse_args(arguments)
    chosen = [setting for setting in SETTINGS if options.setting in setting]
    if not chosen:
        parser.error(f"no setting's name contains {options.setting!r}: {'; '.join(SETTINGS)}")
    suite, repeats = QUICK if options.quick else (options.suite, options.repeats)
    deepspeed = deepspeed_cpu_adam()
    cases = [case_of(setting, suite, repeats, deepspeed) for setting in chosen]
    carry_out("mixed_precision", cases, options.out, tables, threads=options.threads)
    if isinstance(deepspeed, str):
        print(f"Without {DEEPSPEED} ({deepspeed}). To compare: pip install deepspeed")


if __name__ == "__main__":
    main()
