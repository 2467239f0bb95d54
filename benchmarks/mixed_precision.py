"""Time of an optimizer's step in mixed precision, on GPT-2 124M's shapes, and beside DeepSpeed's optimizer for the CPU.

float32, without and with clipping, and with each kind of decay; bfloat16 parameters and gradients with masters; float16
with a GradScaler. DeepSpeedCPUAdam takes part where it is installed and builds. It computes AdamW, as does FusedAdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.step_times.contenders import (
    CLIPPED_PEER,
    MAX_GRAD_NORM,
    PEER,
    Contender,
    Make,
    Params,
    adamw,
    fused_adams,
    fused_adamw,
    parameters,
)
from benchmarks.step_times.harness import Case, Step, carry_out, command
from benchmarks.step_times.suites import QUICK_SUITES, SUITES

SCALE = 1024.0
REPEATS = 15
SUITE = "gpt2-124m"
DEEPSPEED = "DeepSpeedCPUAdam"

Build = Callable[[Params], Step]


def plain(make: Make) -> Build:
    return lambda params: make(params).step


def adams(**options: Any) -> Build:
    return plain(fused_adams(**options))


def fused(**options: Any) -> Build:
    return plain(fused_adamw(**options))


def clipped(make: Make) -> Build:
    return Contender("", "", None, "", make, clips_before=True).build


def with_masters(make: Make) -> Build:
    """Wraps an optimizer without masters of its own: gradients are widened before it, parameters narrowed after."""

    def build(params: Params) -> Step:
        masters = [torch.nn.Parameter(param.detach().float()) for param in params]
        for master in masters:
            master.grad = torch.empty_like(master)
        wide_grads = [master.grad for master in masters]
        step = make(masters).step

        def copy_step_copy() -> None:
            torch._foreach_copy_(wide_grads, [param.grad for param in params])
            step()
            with torch.no_grad():
                torch._foreach_copy_(list(params), masters)

        return copy_step_copy

    return build


def scaled(make: Make) -> Build:
    def build(params: Params) -> Step:
        optimizer: Optimizer = make(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
        scaler.scale(torch.zeros(()))  # makes the scale

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        return step

    return build


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ADAMS, ADAMW, LAGGED = "FusedAdamS exact", "FusedAdamW", "FusedAdamS lagged"
CORRECTED: dict[str, Any] = {"corrected_decay": True}
CAUTIOUS: dict[str, Any] = {"cautious_decay": True}
CLIPPED: dict[str, Any] = {"max_grad_norm": MAX_GRAD_NORM}
MASTERS: dict[str, Any] = {"master_weights": True}

# The dtype of parameters and gradients by setting, and the contenders, torch's best first.
SETTINGS: dict[str, tuple[torch.dtype, dict[str, Build]]] = {
    "float32": (FP32, {PEER: plain(adamw), ADAMS: adams(), LAGGED: adams(schedule="lagged"), ADAMW: fused()}),
    "kinds of decay, float32": (
        FP32,
        {
            ADAMS: adams(),
            f"{ADAMS}, corrected": adams(**CORRECTED),
            f"{ADAMS}, cautious": adams(**CAUTIOUS),
            ADAMW: fused(),
            f"{ADAMW}, corrected (AdamC)": fused(**CORRECTED),
            f"{ADAMW}, cautious": fused(**CAUTIOUS),
            "FusedAdamS independent": adams(decay="independent"),
        },
    ),
    "float32 with clipping": (
        FP32,
        {CLIPPED_PEER: clipped(adamw), ADAMS: adams(**CLIPPED), ADAMW: fused(**CLIPPED)},
    ),
    "bfloat16 with masters": (
        BF16,
        {
            f"{PEER} on float32 copies": with_masters(adamw),
            ADAMS: adams(**MASTERS),
            LAGGED: adams(**MASTERS, schedule="lagged"),
        },
    ),
    "float16 with GradScaler": (FP16, {PEER: scaled(adamw), ADAMS: scaled(fused_adams())}),
}
AMONG_KINDS = dict.fromkeys((f"{ADAMW}, corrected (AdamC)", f"{ADAMW}, cautious"), ADAMW)


def deepspeed_contenders() -> Mapping[str, dict[str, Build]] | str:
    """Returns DeepSpeed's by setting, or why there are none. Building it takes more than a minute, once."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever goes wrong in a foreign build
        return f"{type(error).__name__}: {error}".splitlines()[0]

    def make(params: Params) -> Optimizer:
        optimizer: Optimizer = DeepSpeedCPUAdam(list(params), adamw_mode=True)
        return optimizer

    return {
        "float32": {DEEPSPEED: plain(make)},
        "float32 with clipping": {f"{DEEPSPEED} + clip_grad_norm_": clipped(make)},
        "bfloat16 with masters": {f"{DEEPSPEED} on float32 copies": with_masters(make)},
    }


def case_of(setting: str, is_quick: bool, more: Mapping[str, Build]) -> Case:
    dtype, builds = SETTINGS[setting]
    suite = (QUICK_SUITES if is_quick else SUITES)[SUITE]
    scale = SCALE if "GradScaler" in setting else 1.0

    def converted() -> list[Tensor]:
        params = []
        for wide in parameters(suite.shapes):
            assert wide.grad is not None
            params.append(torch.nn.Parameter(wide.detach().to(dtype)))
            params[-1].grad = wide.grad.mul_(scale).to(dtype)
        return list(params)

    # Each has parameters of its own: masters follow those that others write to, which takes longer than a step.
    own = {name: (lambda _, build=build: build(converted())) for name, build in {**builds, **more}.items()}
    columns = {"setting": setting, "suite": SUITE}
    return Case(f"{setting}, {SUITE}", columns, own, REPEATS, peers=AMONG_KINDS if "kinds" in setting else {})


def main(arguments: Sequence[str] | None = None) -> None:
    options = command("mixed_precision", __doc__).parse_args(arguments)
    deepspeed = deepspeed_contenders()
    more = {} if isinstance(deepspeed, str) else deepspeed
    carry_out(options, [case_of(setting, options.quick, more.get(setting, {})) for setting in SETTINGS])
    if isinstance(deepspeed, str):
        print(f"Without {DEEPSPEED} ({deepspeed}). To compare: pip install deepspeed")


if __name__ == "__main__":
    main()
