"""Time of an optimizer's step in mixed precision, on GPT-2 124M's shapes, and beside DeepSpeed's optimizer for the CPU.

float32, without and with clipping, and with each kind of decay; bfloat16 parameters and gradients with masters; float16
with a GradScaler. DeepSpeedCPUAdam takes part where it is installed and builds. It computes AdamW, as does FusedAdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
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
from benchmarks.step_times.harness import Case, carry_out, command
from benchmarks.step_times.suites import QUICK_SUITES, SUITES

SCALE = 1024.0
REPEATS = 15
SUITE = "gpt2-124m"
DEEPSPEED = "DeepSpeedCPUAdam"

Makes = Mapping[str, Make]


def clipped(make: Make) -> Make:
    contender = Contender("", "", None, "", make, clips_before=True)
    return lambda params: SimpleNamespace(step=contender.build(params))


def with_masters(make: Make) -> Make:
    """Wraps an optimizer without masters of its own: gradients are widened before it, parameters narrowed after."""

    def made(params: Params) -> SimpleNamespace:
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

        return SimpleNamespace(step=copy_step_copy)

    return made


def scaled(make: Make) -> Make:
    def made(params: Params) -> SimpleNamespace:
        optimizer: Optimizer = make(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
        scaler.scale(torch.zeros(()))  # makes the scale

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        return SimpleNamespace(step=step)

    return made


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ADAMS, ADAMW, LAGGED = "FusedAdamS exact", "FusedAdamW", "FusedAdamS lagged"
CORRECTED, CAUTIOUS = f"{ADAMW}, corrected (AdamC)", f"{ADAMW}, cautious"
CLIPPED: dict[str, Any] = {"max_grad_norm": MAX_GRAD_NORM}
MASTERS: dict[str, Any] = {"master_weights": True}

# The dtype of parameters and gradients by setting, and the contenders, torch's best first.
SETTINGS: dict[str, tuple[torch.dtype, Makes]] = {
    "float32": (
        FP32,
        {PEER: adamw, ADAMS: fused_adams(), LAGGED: fused_adams(schedule="lagged"), ADAMW: fused_adamw()},
    ),
    "kinds of decay, float32": (
        FP32,
        {
            ADAMS: fused_adams(),
            f"{ADAMS}, corrected": fused_adams(corrected_decay=True),
            f"{ADAMS}, cautious": fused_adams(cautious_decay=True),
            ADAMW: fused_adamw(),
            CORRECTED: fused_adamw(corrected_decay=True),
            CAUTIOUS: fused_adamw(cautious_decay=True),
            "FusedAdamS independent": fused_adams(decay="independent"),
        },
    ),
    "float32 with clipping": (
        FP32,
        {CLIPPED_PEER: clipped(adamw), ADAMS: fused_adams(**CLIPPED), ADAMW: fused_adamw(**CLIPPED)},
    ),
    "bfloat16 with masters": (
        BF16,
        {
            f"{PEER} on float32 copies": with_masters(adamw),
            ADAMS: fused_adams(**MASTERS),
            LAGGED: fused_adams(**MASTERS, schedule="lagged"),
        },
    ),
    "float16 with GradScaler": (FP16, {PEER: scaled(adamw), ADAMS: scaled(fused_adams())}),
}
AMONG_KINDS = {CORRECTED: ADAMW, CAUTIOUS: ADAMW}


def deepspeed_contenders() -> Mapping[str, Makes] | str:
    """Returns DeepSpeed's by setting, or why there are none. Building it takes more than a minute, once."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever goes wrong in a foreign build
        return f"{type(error).__name__}: {error}".splitlines()[0]

    def make(params: Params) -> Optimizer:
        return DeepSpeedCPUAdam(list(params), adamw_mode=True)  # type: ignore[no-any-return]

    return {
        "float32": {DEEPSPEED: make},
        "float32 with clipping": {f"{DEEPSPEED} + clip_grad_norm_": clipped(make)},
        "bfloat16 with masters": {f"{DEEPSPEED} on float32 copies": with_masters(make)},
    }


def case_of(setting: str, is_quick: bool, more: Makes) -> Case:
    dtype, makes = SETTINGS[setting]
    suite = (QUICK_SUITES if is_quick else SUITES)[SUITE]
    scale = SCALE if "GradScaler" in setting else 1.0

    def converted() -> Iterator[Tensor]:
        for wide in parameters(suite.shapes):
            assert wide.grad is not None
            param = torch.nn.Parameter(wide.detach().to(dtype))
            param.grad = wide.grad.mul_(scale).to(dtype)
            yield param

    # Each has parameters of its own: masters follow those that others write to, which takes longer than a step.
    own = {name: (lambda _, make=make: make(list(converted())).step) for name, make in {**makes, **more}.items()}
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
