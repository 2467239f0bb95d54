"""The metrics that users log, and the lines of `repr`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from swd_fused import backends, decay
from swd_fused.clipping import ClippedSteps
from swd_fused.options import Options

if TYPE_CHECKING:
    from swd_fused.core.stepper import Stepper

Groups = Sequence[dict[str, Any]]


def effective_weight_decay(groups: Groups, exp_avg_sq_mean: Tensor) -> list[float]:
    """Returns for each group the `weight_decay` with which AdamW would shrink the weights as much. Waits for the
    device."""
    decay.note_larger(groups)
    mean = float(exp_avg_sq_mean)
    return [decay.effective_decay(group, mean, max(0.0, float(group["lr"]))) for group in groups]


def metrics(stepper: Stepper, groups: Groups, clipped: ClippedSteps) -> dict[str, float]:
    """Returns what is worth logging of the last step. Waits for the device."""
    exp_avg_sq_mean, grad_norm = stepper.last[0], stepper.last[1]
    names = [group.get("name", index) for index, group in enumerate(groups)]
    decays = list(zip(names, effective_weight_decay(groups, exp_avg_sq_mean), strict=True))
    shares = {name: float(group["lr"]) * decay for (name, decay), group in zip(decays, groups, strict=True)}
    return {
        "grad_norm": float(grad_norm),
        "rms_grad": float(exp_avg_sq_mean.sqrt()),
        **{f"effective_weight_decay/{name}": decay for name, decay in decays},
        **{f"decay_timescale/{name}": 1 / share for name, share in shares.items() if share != 0},
        **({} if stepper.options.max_grad_norm is None else {"clipped_share": clipped.share()}),
        "skipped_steps": float(stepper.skipped_steps),
    }


def options_in_use(stepper: Stepper, params: Sequence[Tensor]) -> str:
    """Returns a line for each option that says how steps are taken, and for each that was asked for."""
    options = stepper.options
    chosen = {backends.describe(param, options): None for param in params}
    shown: dict[str, object] = {
        "backend": " and ".join(chosen),
        "schedule": options.schedule,
        "max_grad_norm": options.max_grad_norm,
    }
    asked_for: Mapping[str, object] = dict(options._asdict().items() - Options()._asdict().items())
    shown.update((name, value) for name, value in sorted(asked_for.items()) if name not in shown)
    if stepper.sharded_over is not None:
        shown["process_group"] = str(stepper.sharded_over)
    return "\n".join(f"{name}: {value}" for name, value in shown.items())
