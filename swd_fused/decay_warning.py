"""Telling, once, that `max_decay` binds, without making any step wait for its device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ADVICE = (
    "FusedAdamS divides weight_decay by the rms gradient, so values made for AdamW are far too large: pass those to "
    "optimizer.match_adamw(weight_decay=...) instead."
)


class DecayWarning:
    """Looks at each step's mean until it has warned. From a GPU the mean comes a step or more late."""

    def __init__(self, advice: str = ADVICE) -> None:
        self._advice = advice
        self._done = False
        self._pending: tuple[Tensor, torch.Event] | None = None

    def watch(self, exp_avg_sq_mean: Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        if self._done:
            return
        tensor_lrs = [group["lr"].reshape(()) for group in groups if isinstance(group["lr"], Tensor)]
        if exp_avg_sq_mean.is_cpu:
            self._warn_if_bound([value.item() for value in (exp_avg_sq_mean, *tensor_lrs)], groups)
            return
        if exp_avg_sq_mean.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self._pending is None:
            self._pending = _on_its_way_to_the_host([exp_avg_sq_mean, *tensor_lrs])
        host, arrival = self._pending
        if arrival.query():
            self._pending = None
            self._warn_if_bound(host.tolist(), groups)

    def _warn_if_bound(self, values: list[float], groups: Sequence[Mapping[str, Any]]) -> None:
        """`values` are the mean and those learning rates that are tensors."""
        exp_avg_sq_mean, *rest = values
        tensor_lrs = iter(rest)
        if not exp_avg_sq_mean > 0:
            return
        rms = math.sqrt(exp_avg_sq_mean)
        for index, group in enumerate(groups):
            lr = next(tensor_lrs, 0.0) if isinstance(group["lr"], Tensor) else group["lr"]
            weight_decay, max_decay = group["weight_decay"], group["max_decay"]
            scheduled = weight_decay / (rms + group["eps"])
            if lr * scheduled > max_decay:
                self._done = True
                warnings.warn(
                    f"max_decay={max_decay:g} binds in parameter group {index}: at an rms gradient of {rms:.2g} "
                    f"weight_decay={weight_decay:g} acts like {scheduled:.3g} in AdamW and would remove "
                    f"{lr * scheduled:.3g} of each weight in one step. {self._advice}",
                    stacklevel=2,
                )
                return


def _on_its_way_to_the_host(values: list[Tensor]) -> tuple[Tensor, torch.Event]:
    device, dtype = values[0].device, values[0].dtype
    stacked = torch.stack([value.detach().to(device, dtype, non_blocking=True) for value in values])
    host = torch.empty(len(values), dtype=dtype, device="cpu", pin_memory=True).copy_(stacked, non_blocking=True)
    arrival = torch.Event(device=device)
    arrival.record()
    return host, arrival
