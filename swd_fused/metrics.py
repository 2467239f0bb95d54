"""The numbers that users log, and the lines of `repr`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swd_fused import backends
from swd_fused.core.step import Stepper
from swd_fused.core.values import Groups
from swd_fused.decay.kinds import effective_decay
from swd_fused.devices import graphs
from swd_fused.devices.transfer import is_fake, to_device
from swd_fused.observer import Observer
from swd_fused.options import Options
from swd_fused.user_warning import warn_user

if TYPE_CHECKING:
    from swd_fused.core.step import Step

# How many steps there must be, all of them clipped, for a warning.
CLIPPED_STEPS = 300


def effective_weight_decay(groups: Groups, exp_avg_sq_mean: Tensor) -> list[float]:
    """Returns for each group the AdamW `weight_decay` that would shrink weights as much. Waits for the device."""
    mean = float(exp_avg_sq_mean)
    return [effective_decay(group, mean, max(0.0, float(group["lr"]))) for group in groups]


def metrics(stepper: Stepper, groups: Groups, clipped: ClippedSteps) -> dict[str, float]:
    """Returns the last step's numbers for a log. Waits for the device."""
    exp_avg_sq_mean, grad_norm = stepper.last[0], stepper.last[1]
    names = [group.get("name", index) for index, group in enumerate(groups)]
    decays = list(zip(names, effective_weight_decay(groups, exp_avg_sq_mean), strict=True))
    shares = {name: float(group["lr"]) * decay for (name, decay), group in zip(decays, groups, strict=True)}
    return {
        "grad_norm": float(grad_norm),
        "rms_grad": float(exp_avg_sq_mean.sqrt()),
        **{f"effective_weight_decay/{name}": decay for name, decay in decays},
        **{f"decay_timescale/{name}": 1 / share for name, share in shares.items() if share != 0},
        **clipped.metrics(stepper.options, groups),
        "skipped_steps": float(stepper.skipped_steps),
    }


def options_in_use(stepper: Stepper, params: Sequence[Tensor]) -> str:
    """Returns a line each for backend, schedule and max_grad_norm, and for every option that was set."""
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


class ClippedSteps(Observer):
    """Counts the steps that were clipped, and all steps that were taken with `max_grad_norm`.

    On a CPU the counts are numbers: there is nothing to wait for, and tensor operations would take half as long as a
    small step. On other devices they are tensors.
    """

    needs_all_steps = False  # putting off Ctrl-C took a twentieth of a small step, and a share may lack one
    _has_warned = False

    def __init__(self) -> None:
        self._clipped = self._all = 0
        self._on_device: Tensor | None = None  # both counts; a CUDA graph increases them in each replay

    def concerns(self, groups: Groups, options: Options) -> bool:
        return options.max_grad_norm is not None

    def note(self, step: Step) -> None:
        """Counts a step, unless it was skipped. A step that takes several calls counts once."""
        if step.is_continued:
            return
        results, max_grad_norm = step.results, step.gate.max_grad_norm or math.inf
        if results.is_cpu and type(results) is Tensor:
            _, norm, skip = results.tolist()
            if not skip:
                self._clipped += norm > max_grad_norm
                self._all += 1
        elif not is_fake(results):
            is_taken = results[2] == 0
            if self._on_device is None:
                self._on_device = torch.zeros(2, dtype=torch.int64, device=results.device)
            self._on_device = to_device(self._on_device, results.device)
            self._on_device.add_(torch.stack([is_taken & (results[1] > max_grad_norm), is_taken]))

    def refuse_capture(self, step: Step) -> None:
        device = step.ranks.device
        if device.type != "cpu" and (self._on_device is None or self._on_device.device != device):
            raise graphs.first_in_capture("that clips", "the count of clipped steps")

    def metrics(self, options: Options, groups: Groups) -> dict[str, float]:
        """Returns the share of clipped steps, NaN before the first. Waits for the device.

        Warns, once, if clipping makes the schedule constant: if all steps were clipped, all had the same gradient norm,
        so the schedule divided by a constant. There is no warning during calibration, which decays as AdamW on purpose.
        """
        if options.max_grad_norm is None:
            return {}
        clipped, counted = (0, 0) if self._on_device is None else self._on_device.tolist()
        clipped, counted = clipped + self._clipped, counted + self._all
        is_scheduled = options.decay == "scheduled" and any(group["weight_decay"] for group in groups)
        is_calibrated = all(group["adamw_weight_decay"] is None for group in groups)
        if clipped == counted >= CLIPPED_STEPS and is_scheduled and is_calibrated and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"All {counted} steps so far were clipped to max_grad_norm={options.max_grad_norm:g}. So the rms "
                "gradient of each is the same, the schedule is constant, and AdamS is AdamW with another weight_decay. "
                "Pass a max_grad_norm above the usual norms, which optimizer.grad_norm tells; or use "
                'decay="decoupled", which does the same as now directly.'
            )
        return {"clipped_share": clipped / counted if counted else math.nan}
