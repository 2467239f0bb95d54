"""Weight decay for people who think in AdamW's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from swd_fused import schedule
from swd_fused.buckets import Buckets
from swd_fused.options import Options, check_match_adamw
from swd_fused.schedule import Hyper, hyper_rows


class InAdamWTerms(Optimizer):
    """The part of FusedAdamS that translates."""

    param_groups: list[dict[str, Any]]
    exp_avg_sq_mean: Tensor
    options: Options
    _buckets: Buckets
    _adamw_weight_decay: float | None

    def effective_weight_decay(self) -> list[float]:
        """For each group, the `weight_decay` with which AdamW would shrink the weights as much as this does now.

        At the mean of the last step, NaN before the first. Waits for the device.
        """
        rows = hyper_rows(self.param_groups, self.options.decay)
        hyper = Hyper(rows, self.exp_avg_sq_mean.device)
        hyper.set_tensor_lrs(self.param_groups)
        decay = schedule.effective_weight_decay(self.exp_avg_sq_mean, hyper)
        return torch.where(self.exp_avg_sq_mean.isnan(), self.exp_avg_sq_mean, decay).tolist()

    def match_adamw(self, weight_decay: float) -> None:
        """Makes the next step decay as AdamW with this `weight_decay` would; from there on the schedule takes over.

        Sets `weight_decay` in each group that decays at all: at once from the last step's mean, if there is one, and
        exactly in the next step, which knows its own mean and waits for the device this once.
        """
        check_match_adamw(weight_decay, self.options.decay, self.param_groups)
        self._adamw_weight_decay = weight_decay
        if 0 < self.exp_avg_sq_mean < math.inf:
            self._set_weight_decay(weight_decay, self.exp_avg_sq_mean)

    def _match_adamw_now(self, exp_avg_sq_mean: Tensor) -> None:
        """Waits for a step with a usable mean: that of zero gradients, or of bad ones, says nothing."""
        if self._adamw_weight_decay is not None and 0 < exp_avg_sq_mean < math.inf:
            self._set_weight_decay(self._adamw_weight_decay, exp_avg_sq_mean)
            self._adamw_weight_decay = None

    def _set_weight_decay(self, adamw_weight_decay: float, exp_avg_sq_mean: Tensor) -> None:
        rms = float(exp_avg_sq_mean.sqrt())
        for group in self.param_groups:
            if group["weight_decay"] > 0:
                group["weight_decay"] = adamw_weight_decay * (rms + group["eps"])
        for bucket in self._buckets.current:
            bucket.set_hyper(self.param_groups)
