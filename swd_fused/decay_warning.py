"""Telling, once, that `max_decay` binds, without making any step wait for its device."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from swd_fused import schedule
from swd_fused.schedule import Hyper


class DecayWarning:
    """Looks at each step's decay until it has warned. On a GPU the answer comes a step or more late."""

    def __init__(self) -> None:
        self._done = False
        self._pending: tuple[Tensor, torch.Event | None] | None = None

    def watch(self, exp_avg_sq_mean: Tensor, hyper: Hyper) -> None:
        if self._done:
            return
        if self._pending is None:
            self._pending = _on_its_way_to_the_host(exp_avg_sq_mean, hyper)
        columns, arrival = self._pending
        if arrival is None or arrival.query():
            self._pending = None
            self._warn_if_bound(columns)

    def _warn_if_bound(self, columns: Tensor) -> None:
        for index, (scheduled, lr, weight_decay, max_decay) in enumerate(columns.T.tolist()):
            if lr * scheduled > max_decay:
                self._done = True
                warnings.warn(
                    f"max_decay={max_decay:g} binds in parameter group {index}: at this rms gradient weight_decay="
                    f"{weight_decay:g} acts like {scheduled:.3g} in AdamW and would remove {lr * scheduled:.3g} of "
                    "each weight in this step. FusedAdamS divides weight_decay by the rms gradient, so values made for "
                    "AdamW are far too large: pass those to optimizer.match_adamw(weight_decay=...) instead.",
                    stacklevel=2,
                )
                return


def _on_its_way_to_the_host(exp_avg_sq_mean: Tensor, hyper: Hyper) -> tuple[Tensor, torch.Event | None]:
    scheduled = schedule.scheduled_weight_decay(exp_avg_sq_mean, hyper)
    columns = torch.stack([scheduled, hyper.lr, hyper.weight_decay, hyper.max_decay])
    if columns.is_cpu:
        return columns, None
    host = torch.empty(columns.shape, dtype=columns.dtype, pin_memory=True).copy_(columns, non_blocking=True)
    arrival = torch.Event(device=columns.device)
    arrival.record()
    return host, arrival
