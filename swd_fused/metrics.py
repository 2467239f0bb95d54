"""What users log and print of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused import backends, decay
from swd_fused.clipping_warning import ClippingWarning, Counts
from swd_fused.devices.transfer import can_be_read, is_fake, to_device
from swd_fused.options import Options

if TYPE_CHECKING:
    from swd_fused.core.step import Step
    from swd_fused.core.stepper import Stepper

Groups = Sequence[dict[str, Any]]


class ClippedSteps:
    """Counts the steps that clipped, and all that might have, and warns if nothing is left of the schedule.

    The counts are numbers for steps on a CPU, where there is nothing to wait for and tensor operations would take half
    as long as a small step; else tensors.
    """

    needs_small_mean = False

    def __init__(self) -> None:
        self._clipped = self._all = 0
        self._on_device: Tensor | None = None  # both again; a CUDA graph increases them in each replay
        self._warning = ClippingWarning()
        self._steps_to_look = 0  # until it looks at the counts again
        self.is_due = True
        self._options = Options()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the counts. The warning may have a copy from a device under way; another one starts anew."""
        return {name: getattr(self, name) for name in ("_clipped", "_all", "_on_device")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ClippedSteps.__init__(self)
        self.__dict__.update(state)

    def concerns(self, groups: Groups, options: Options) -> bool:
        self._options = options
        return options.max_grad_norm is not None

    def speak(self, groups: Groups) -> None:
        """Lets the warning look at the counts."""
        self.is_due = False
        if self._options.decay == "scheduled":
            self._steps_to_look = self._warning.look(groups, self.counts(), self._options.max_grad_norm)
            self.is_due = self._steps_to_look == 0

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Goes on counting: the share is that of all steps since the optimizer was made."""

    def note(self, step: Step) -> None:
        """Counts a step, unless it was skipped. One in several calls counts once."""
        if step.is_continued:
            return
        self._steps_to_look -= 1
        if self._steps_to_look == 0:
            self.is_due = True
        results, max_grad_norm = step.results, step.gate.max_grad_norm or math.inf
        if type(results) is Tensor and results.is_cpu:
            _, norm, skip = results.tolist()
        elif is_fake(results[1]):
            return
        elif can_be_read(results[1]):
            norm, skip = float(results[1]), step.skip is not None and bool(step.skip)
        else:
            self._count_on_device(results[1], max_grad_norm, step.skip)
            return
        if not skip:
            self._clipped += norm > max_grad_norm
            self._all += 1

    def _count_on_device(self, grad_norm: Tensor, max_grad_norm: float, skip: Tensor | None) -> None:
        if self._on_device is None:
            self._on_device = torch.zeros(2, dtype=torch.int64, device=grad_norm.device)
        self._on_device = to_device(self._on_device, grad_norm.device)
        clipped, counted = self._on_device.unbind()
        clips = grad_norm > max_grad_norm
        if skip is None:
            clipped.add_(clips)
            counted.add_(1)
        else:
            is_taken = skip == 0
            clipped.add_(clips & is_taken)
            counted.add_(is_taken)

    def refuse_capture(self, step: Step) -> None:
        device = step.ranks.device
        if device.type != "cpu" and (self._on_device is None or self._on_device.device != device):
            raise RuntimeError(
                "FusedAdamS got the first step that clips in the capture of a CUDA graph, which would set the count of "
                "clipped steps back in each replay. Take such a step before, on a side stream."
            )

    def share(self) -> float:
        """Returns the share of clipped steps, NaN before the first. Waits for the device."""
        clipped, counted = map(int, self.counts())
        return clipped / counted if counted else math.nan

    def counts(self) -> Counts:
        """Returns the steps that clipped, and all that might have. Does not wait for the device."""
        clipped, counted = (0, 0) if self._on_device is None else self._on_device.unbind()
        return self._clipped + clipped, self._all + counted


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
