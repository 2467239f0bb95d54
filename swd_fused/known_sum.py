"""Steps that are told the sum of squared gradients, and so need no pass 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.bucket import Bucket
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import Sharding, full_tensor, is_dtensor, local_tensor
from swd_fused.loss_scale import LossScale
from swd_fused.schedule import bias_corrections, scalar_dtype
from swd_fused.step import Number, clipped, skipped
from swd_fused.upload import moved


class Known(NamedTuple):
    """`numel` elements have `grad_sumsq`; None stands for those that are stepped with it, on all ranks."""

    grad_sumsq: Tensor
    numel: int | None


def checked(
    grad_sumsq: float | Tensor,
    numel: int | None,
    groups: Sequence[Mapping[str, Any]],
    lagged: bool,
    device: torch.device,
) -> Known:
    if isinstance(grad_sumsq, Tensor):
        if is_dtensor(grad_sumsq):  # the square of what clip_grad_norm_ returns for sharded models
            grad_sumsq = full_tensor(grad_sumsq)
        if grad_sumsq.numel() != 1:
            raise ValueError(f"step got grad_sumsq of shape {tuple(grad_sumsq.shape)}, wanted one number.")
        value = moved(grad_sumsq.detach().reshape(()), device, scalar_dtype(device))
    elif isinstance(grad_sumsq, Real) and not grad_sumsq < 0:
        value = torch.full((), float(grad_sumsq), dtype=scalar_dtype(device), device=device)
    else:
        raise ValueError(
            f"step got grad_sumsq={grad_sumsq!r}, wanted a number >= 0, the square of the gradients' norm."
        )
    if numel is not None and not (isinstance(numel, int) and numel > 0):
        raise ValueError(f"step got numel={numel!r}, wanted the number of elements that grad_sumsq is the sum over.")
    if lagged:
        raise ValueError(
            'step got grad_sumsq with schedule="lagged", which looks at no gradient of this step. '
            'Use schedule="exact": with grad_sumsq it reads memory just as often.'
        )
    if any(group["amsgrad"] for group in groups):
        raise ValueError(
            "step got grad_sumsq with amsgrad=True, whose maxima do not follow from it. Call step() without."
        )
    beta2s = {float(group["betas"][1]) for group in groups}
    corrects_bias = {group["bias_correction"] for group in groups}
    for name, values in (("betas", beta2s), ("bias_correction", corrects_bias)):
        if len(values) > 1:
            raise ValueError(
                f"step got grad_sumsq with groups of different {name}, {sorted(values)}: how the sum is spread over "
                "them would have to be known too. Call step() without, or use one value."
            )
    return Known(value, numel)


def number(
    known: Known,
    buckets: Sequence[Bucket],
    collective: Collective,
    max_grad_norm: float | None,
    total_numel: int | None,
    loss_scale: LossScale,
) -> Number:
    """For a step of all that `known` covers.

    Exact where all parameters have taken equally many steps. Where not, the squared gradients count as spread evenly.
    """
    rows = [(bucket.sharding, _carried_sums(bucket)) for bucket in buckets]
    carried, weight, count = collective.total(rows, 3).unbind()
    grad_norm, grad_factor, grad_sum = _factored(known, max_grad_norm, loss_scale, collective.device)
    count = count.clamp(min=1)
    hat_sum = carried + grad_sum * weight / count
    mean = hat_sum / (count if total_numel is None else total_numel)
    return Number(mean, grad_norm, grad_factor, skipped(loss_scale, grad_norm, collective))


def _carried_sums(bucket: Bucket) -> Tensor:
    """What v^ will have of the steps before, the weight of this one's squared gradients, and elements."""
    beta2 = bucket.hyper.column("beta2")[bucket.groups]
    weight = (1 - beta2) * bucket.numels / bias_corrections(bucket.hyper, bucket.groups, bucket.steps + 1)[1]
    return torch.stack([bucket.backend.carried_sum(bucket), weight.sum(), bucket.count])


def _factored(
    known: Known, max_grad_norm: float | None, loss_scale: LossScale, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm, what gradients are multiplied by, and the sum of their squares after that."""
    grad_norm, grad_factor = clipped(known.grad_sumsq, max_grad_norm, loss_scale.unscale(device))
    grad_sum = known.grad_sumsq if grad_factor is None else grad_factor.square() * known.grad_sumsq
    return grad_norm, grad_factor, grad_sum


class WholeModelSum:
    """The sum of v over `numel` elements, of which a call may step only some: wrappers step one group at a time.

    Only the sum is carried from step to step, without communication. So all its elements must have a gradient in each
    step. Calls belong to the same step until a parameter comes again.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._steps: Tensor | None = None
        self._stepped: set[int] = set()
        self._number: Number | None = None
        self.goes_on = False  # whether the last call belongs to the same step as the one before

    def number(
        self,
        known: Known,
        params: Sequence[Tensor],
        beta2: float,
        bias_correction: bool,
        max_grad_norm: float | None,
        loss_scale: LossScale,
        collective: Collective,
        loaded: Callable[[], tuple[Tensor, Tensor]],
    ) -> Number:
        """`loaded()` adds up the state as it is, on all ranks: the sum of v, and steps taken."""
        assert known.numel is not None
        ids = set(map(id, params))
        self.goes_on = self._number is not None and self._stepped.isdisjoint(ids)
        self._stepped = self._stepped | ids if self.goes_on else ids
        if self._number is not None and self.goes_on:
            return self._number
        if self._sum is None or self._steps is None:
            self._sum, self._steps = loaded()
        grad_norm, grad_factor, grad_sum = _factored(known, max_grad_norm, loss_scale, collective.device)
        skip = skipped(loss_scale, grad_norm, collective)
        next_sum = beta2 * self._sum + (1 - beta2) * grad_sum
        self._sum = next_sum if skip is None else torch.where(skip != 0, self._sum, next_sum)
        self._steps = self._steps + (1.0 if skip is None else 1 - skip)
        mean = self._sum / (1 - bias_correction * beta2**self._steps) / known.numel
        self._number = Number(mean, grad_norm, grad_factor, skip)
        return self._number


def sums_of_state(
    states: Sequence[tuple[Sharding, Mapping[str, Any]]], collective: Collective
) -> tuple[Tensor, Tensor]:
    """The sum of v on all ranks, and the most steps that any parameter here has taken."""
    device, dtype = collective.device, scalar_dtype(collective.device)
    rows = []
    for sharding, state in states:
        moment = local_tensor(state["exp_avg_sq"])
        moment = torch.view_as_real(moment) if moment.is_complex() else moment
        rows.append((sharding, moment.sum(dtype=dtype).reshape(1).to(device)))
    steps = [torch.zeros((), dtype=dtype, device=device), *(state["step"].to(device, dtype) for _, state in states)]
    return collective.total(rows, 1)[0], torch.stack(steps).max()
