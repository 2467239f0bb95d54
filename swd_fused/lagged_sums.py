"""What a lagged step leaves to the next one, on its way to all ranks while the model computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swd_fused.bucket import Bucket
from swd_fused.distributed.collective import Collective, Reduction
from swd_fused.loss_scale import LossScale
from swd_fused.step import Number, exact, last_mean, skipped


class LaggedSums:
    """The mean is over the parameters that took the step before, whichever have a gradient now: all ranks know the
    former, and the latter would have to be asked for. Of a loaded state nobody knows them, so there it is over those
    that have a gradient now and have taken a step at all.
    """

    def __init__(self) -> None:
        self._reduction: Reduction | None = None
        self._sums: Tensor | None = None  # of v^, of elements, of squared gradients

    def leave(self, buckets: Sequence[Bucket], collective: Collective, loss_scale: LossScale) -> None:
        """At the end of a step."""
        rows = [(bucket.sharding, _sums_left(bucket, loss_scale.unscale(bucket.device))) for bucket in buckets]
        self._reduction = collective.start(rows, 3)

    def number(
        self,
        buckets: Sequence[Bucket],
        collective: Collective,
        total_numel: int | None,
        amsgrad: bool,
        loss_scale: LossScale,
    ) -> Number:
        """At the beginning of the next. `grad_norm` is that of the step before too."""
        if self._reduction is None:
            return _first_number(buckets, collective, total_numel, amsgrad, loss_scale)
        sums = self._reduction.finish()
        if loss_scale.may_skip and self._sums is None and sums.is_cpu and not sums[1] > 0:  # all so far were skipped
            return _first_number(buckets, collective, total_numel, amsgrad, loss_scale)
        # A step in which no rank had a gradient left nothing.
        self._sums = sums if self._sums is None else torch.where(sums[1] > 0, sums, self._sums)
        unscale, skip = loss_scale.unscale(collective.device), skipped(loss_scale, None, collective)
        return Number(last_mean(self._sums, total_numel), self._sums[2].sqrt(), unscale, skip)

    def abandon(self) -> None:
        if self._reduction is not None:
            self._reduction.abandon()
        self._reduction = self._sums = None


def _sums_left(bucket: Bucket, unscale: Tensor | None) -> Tensor:
    assert bucket.grad_sum is not None, "update sets it"
    grad_sum = bucket.grad_sum if unscale is None else unscale.square() * bucket.grad_sum
    return torch.cat([bucket.backend.last_exp_avg_sq_sum(bucket), grad_sum.reshape(1)])


def _first_number(
    buckets: Sequence[Bucket],
    collective: Collective,
    total_numel: int | None,
    amsgrad: bool,
    loss_scale: LossScale,
) -> Number:
    """Exact, unless any rank has loaded state. That is decided on the device, by all ranks alike."""
    rows = [(bucket.sharding, bucket.backend.last_exp_avg_sq_sum(bucket)) for bucket in buckets]
    last_sums = collective.total(rows, 2)
    number = exact(buckets, collective, None, total_numel, amsgrad, loss_scale)
    mean = torch.where(last_sums[1] > 0, last_mean(last_sums, total_numel), number.exp_avg_sq_mean)
    return number._replace(exp_avg_sq_mean=mean)
