"""What users log and print of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from swd_fused.options import Options
from swd_fused.step.stepper import Stepper
from swd_fused.tensors.description import backend_for


def metrics(stepper: Stepper, groups: Sequence[Mapping[str, Any]], weight_decays: Sequence[float]) -> dict[str, float]:
    """Returns what is worth logging of the last step. `weight_decays` are the effective ones of the groups."""
    clipped = {} if stepper.options.max_grad_norm is None else {"clipped_share": stepper.clipped_steps.share()}
    names = [group.get("name", index) for index, group in enumerate(groups)]
    decays = list(zip(names, weight_decays, strict=True))
    shares = {name: float(group["lr"]) * decay for (name, decay), group in zip(decays, groups, strict=True)}
    exp_avg_sq_mean, grad_norm = stepper.last[0], stepper.last[1]
    return {
        "grad_norm": float(grad_norm),
        "rms_grad": float(exp_avg_sq_mean.sqrt()),
        **{f"effective_weight_decay/{name}": decay for name, decay in decays},
        **{f"decay_timescale/{name}": 1 / share for name, share in shares.items() if share != 0},
        **clipped,
        "skipped_steps": float(stepper.skipped_steps),
    }


def options_in_use(stepper: Stepper, params: Sequence[Tensor]) -> str:
    """Returns a line for each option that says how steps are taken, and for each that was asked for."""
    options = stepper.options
    chosen = {backend_for(param, options)[1]: None for param in params}
    shown: dict[str, object] = {
        "backend": " and ".join(chosen),
        "schedule": options.schedule,
        "max_grad_norm": options.max_grad_norm,
    }
    asked_for = options._asdict().items() - Options()._asdict().items()
    shown.update((name, value) for name, value in sorted(asked_for) if name not in shown)
    if stepper.sharded_over is not None:
        shown["process_group"] = str(stepper.sharded_over)
    return "\n".join(f"{name}: {value}" for name, value in shown.items())
