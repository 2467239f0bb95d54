"""The largest learning rate so far, to which corrected and independent decay relate the present one.

It is an entry of the group, so it is saved and loaded with it: a number, or where `lr` is a tensor, a tensor beside it
that steps advance in place, on the device and in each replay of a CUDA graph. Steps that were taken count, and those
that were skipped, of which the host may not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from swd_fused.devices import graphs
from swd_fused.devices.transfer import from_host, is_fake, scalar_dtype
from swd_fused.user_warning import warn_user

SO_FAR = "largest_lr_so_far"

# By how much schedulers, and tensors of float32, may miss the peak that they are to reach.
PEAK_ROUNDING = 1e-6

Group = Mapping[str, Any]
Lr = TypeVar("Lr", float, Tensor)


def is_related(group: Group) -> bool:
    """Returns whether the decay of a group depends on the largest learning rate so far."""
    return group["decay"] == "independent" or bool(group["corrected_decay"])


def related_lr(group: Group, lr: Lr, largest: Lr) -> Lr:
    """Returns what takes the place of a learning rate > 0 before `weight_decay`. While it is the largest one, corrected
    decay has `lr` itself, to the bit."""
    share = lr / largest
    return share if group["decay"] == "independent" else lr * share


def largest_lr(group: Group, lr: float) -> float:
    """Returns the largest learning rate if this one counts. May wait for a device."""
    return max(lr, _number(group[SO_FAR]), group["largest_lr"] or 0.0)


class NumberLr:
    """Follows a learning rate that is a number."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        if isinstance(group[SO_FAR], Tensor):  # of a tensor that was `lr` before
            group[SO_FAR] = _number(group[SO_FAR])

    def begin(self) -> None:
        """Warns of a learning rate that is larger than what was given. Called before a step."""
        warn_of_larger(self._group, self._group["lr"])

    def decay_lr(self) -> None:
        """Leaves this to the group's row."""

    def count(self) -> None:
        """Counts the learning rate of a step that was taken."""
        if self._group["lr"] > self._group[SO_FAR]:
            self._group[SO_FAR] = float(self._group["lr"])


class TensorLr:
    """Follows a learning rate that is a tensor."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group, self._lr = group, group["lr"]
        so_far, device = group[SO_FAR], self._lr.device
        if not isinstance(so_far, Tensor) or so_far.device != device:
            if graphs.is_capturing(device):
                raise RuntimeError(
                    "FusedAdamS got the first step with this lr, whose largest value the decay depends on, in the "
                    "capture of a CUDA graph, which would set it back in each replay. Take such a step before."
                )
            so_far = _on_device(so_far, device)
        self._so_far = group[SO_FAR] = so_far

    def begin(self) -> None:
        """Warns of a learning rate that is larger than what was given. One on a GPU is not waited for."""
        if self._lr.is_cpu and not is_fake(self._lr):
            warn_of_larger(self._group, float(self._lr))

    def decay_lr(self) -> Tensor:
        """Returns on the device what takes the place of the learning rate before `weight_decay`."""
        if graphs.is_capturing(self._so_far.device):
            graphs.keep(self._so_far)
        lr = self._number()
        largest = torch.fmax(self._so_far.reshape(()), lr).clamp(min=self._group["largest_lr"] or 0.0)
        return torch.where(lr > 0, related_lr(self._group, lr, largest), 0.0)

    def count(self) -> None:
        """Counts the learning rate of a step that was taken."""
        torch.fmax(self._so_far, self._number(), out=self._so_far)  # which ignores NaN

    def _number(self) -> Tensor:
        lr: Tensor = self._lr.detach().reshape(()).to(self._so_far.dtype).clamp(min=0)
        return lr


def follow_lr(group: dict[str, Any]) -> NumberLr | TensorLr | None:
    """Returns what follows the learning rate of a group for its decay, None if that does not depend on it."""
    if not is_related(group):
        return None
    return TensorLr(group) if isinstance(group["lr"], Tensor) else NumberLr(group)


def note_larger(groups: Sequence[dict[str, Any]]) -> None:
    """Warns of learning rates on a device that were larger than what was given. Waits for the device."""
    for group in groups:
        if group["largest_lr"] is not None and isinstance(group[SO_FAR], Tensor):
            warn_of_larger(group, _number(group[SO_FAR]))


def warn_of_larger(group: dict[str, Any], lr: float) -> None:
    """Warns, once, of a learning rate that is larger than what was given, which has no meaning any more."""
    given = group["largest_lr"]
    if given is None or lr <= given * (1 + PEAK_ROUNDING):
        return
    group["largest_lr"] = None
    warn_user(
        f"FusedAdamS got lr={lr:g} after largest_lr={given:g}, which was to be the largest. The decay is related to "
        "the larger one from here on. Pass the peak of the schedule as largest_lr, or leave it out.",
    )


def _on_device(so_far: float | Tensor, device: torch.device) -> Tensor:
    """Returns a tensor with one dimension: those of float64 without any torch.compile takes for Python's numbers, and
    compiles twice."""
    dtype = scalar_dtype(device)
    if isinstance(so_far, Tensor):
        return so_far.detach().reshape(1).to(device, dtype, copy=True)
    return from_host(torch.tensor([so_far], dtype=dtype, device="cpu"), device)


def _number(so_far: float | Tensor) -> float:
    """Waits for a device after another kind of `lr` was set, once."""
    if isinstance(so_far, Tensor) and graphs.is_capturing(so_far.device):
        raise RuntimeError(
            "FusedAdamS got a number as lr in place of a tensor, in the capture of a CUDA graph, which cannot wait for "
            "the largest learning rate so far. Take a step with that number before."
        )
    return float(so_far)
