"""The largest learning rate so far, to which corrected and independent decay relate the present one.

It is an entry of the group, so it is saved and loaded with it: a number, or where `lr` is a tensor, a tensor beside it
that steps advance in place, on the device and in each replay of a CUDA graph. Steps that were taken count, and those
that were skipped, of which the host may not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swd_fused.options import Decay
from swd_fused.tensors import graphs
from swd_fused.tensors.transfer import from_host, is_fake
from swd_fused.user_warning import warn_user

SO_FAR = "largest_lr_so_far"

# By how much schedulers, and tensors of float32, may miss the peak that they are to reach.
PEAK_ROUNDING = 1e-6


def is_followed(group: Mapping[str, Any], decay: Decay) -> bool:
    """Returns whether the decay of a group depends on the largest learning rate."""
    return decay == "independent" or bool(group.get("corrected_decay", False))


def decay_lr(lr: float, largest: float, decay: Decay) -> float:
    """Returns what takes the place of the learning rate before `weight_decay`. While `lr` is the largest one, corrected
    decay has `lr` itself, to the bit."""
    share = lr / largest if lr > 0 else 0.0
    return share if decay == "independent" else lr * share


def correction(group: Mapping[str, Any], decay: Decay) -> float:
    """Returns `decay_lr` in units of `lr`, also where that is 0. Waits for the device if `lr` is a tensor."""
    if not is_followed(group, decay):
        return 1.0
    lr = max(0.0, float(group["lr"]))
    largest = largest_lr(group, lr)
    if decay == "independent":
        return 1 / largest if largest > 0 else 0.0
    return lr / largest if largest > 0 else 1.0


def largest_lr(group: Mapping[str, Any], lr: float) -> float:
    """Returns the largest learning rate if this one counts. May wait for a device."""
    return max(lr, _number(group[SO_FAR]), group["largest_lr"] or 0.0)


def begin_following(group: dict[str, Any], lr: float) -> None:
    """Has a group keep a number, after a tensor perhaps."""
    if isinstance(group[SO_FAR], Tensor):
        group[SO_FAR] = _number(group[SO_FAR])
    warn_of_larger(group, lr)


def note_larger(groups: Sequence[dict[str, Any]]) -> None:
    """Warns of learning rates on a device that were larger than what was given. Waits for the device."""
    for group in groups:
        if group["largest_lr"] is not None and isinstance(group[SO_FAR], Tensor):
            warn_of_larger(group, _number(group[SO_FAR]))


class TensorLr:
    """Follows a learning rate that is a tensor. `dtype` is that of numbers on its device."""

    def __init__(self, group: Mapping[str, Any], decay: Decay, dtype: torch.dtype) -> None:
        self._lr: Tensor = group["lr"]
        self._decay, self._given = decay, group["largest_lr"] or 0.0
        so_far, device = group[SO_FAR], self._lr.device
        if not isinstance(so_far, Tensor) or so_far.device != device:
            if graphs.is_capturing(device):
                raise RuntimeError(
                    "FusedAdamS got the first step with this lr, whose largest value the decay depends on, in the "
                    "capture of a CUDA graph, which would set it back in each replay. Take such a step before."
                )
            so_far = _on_device(so_far, device, dtype)
        self.so_far = so_far

    def warn(self, group: dict[str, Any]) -> None:
        """Warns of a learning rate that is larger than what was given. One on a GPU is not waited for."""
        if self._lr.is_cpu and not is_fake(self._lr):
            warn_of_larger(group, float(self._lr))

    def decay_lr(self) -> Tensor:
        """Returns what the function of this name does, beside the learning rate."""
        if graphs.is_capturing(self.so_far.device):
            graphs.keep(self.so_far)
        lr = self._number()
        largest = torch.fmax(self.so_far.reshape(()), lr).clamp(min=self._given)
        share = torch.where(lr > 0, lr / largest, 0.0)
        return share if self._decay == "independent" else lr * share

    def count(self) -> None:
        """Counts the learning rate as it is now."""
        torch.fmax(self.so_far, self._number(), out=self.so_far)  # which ignores NaN

    def _number(self) -> Tensor:
        return self._lr.detach().reshape(()).to(self.so_far.dtype).clamp(min=0)


def _on_device(so_far: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with one dimension: those of float64 without any torch.compile takes for Python's numbers, and
    compiles twice."""
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
