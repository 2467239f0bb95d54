"""Where a step's four sums come from: pass 1, the step before, or the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from swd_fused.distributed.collective import Collective, Reduction
from swd_fused.distributed.sharding import Sharding, full_tensor, is_dtensor
from swd_fused.schedule import Gate, Sums
from swd_fused.state.moments import decoded_moment
from swd_fused.tensors.bucket import Bucket
from swd_fused.tensors.description import Description
from swd_fused.tensors.hyper import scalar_dtype
from swd_fused.tensors.transfer import is_fake, to_device


class Source(Protocol):
    """Gives the four sums of a step. All ranks must use the same source, whatever gradients and state each has."""

    def sums(self, step: Description, gate: Gate) -> Sums:
        """Returns the sums over all ranks. Writes to nothing that is the user's."""

    def leave(self, step: Description, grad_sqs: Sequence[Tensor], gate: Gate, skip: Tensor | None) -> None:
        """Keeps what the next step needs, after pass 2, which has summed the squared gradients of each bucket."""


class PassOne:
    """Reads this step's gradients."""

    def sums(self, step: Description, gate: Gate) -> Sums:
        ranks = step.ranks
        rows = [(bucket.sharding, self._row(bucket)) for bucket in step.buckets]
        grad_sq, carried, fresh, count = ranks.total(rows, 4).unbind()
        if step.has_amsgrad:  # on all ranks, whatever tensors each has
            grad_factor = gate.grad_factor(grad_sq, ranks.device)
            maxima = [_maxima(bucket, on_device_of(bucket, grad_factor)) for bucket in step.buckets if bucket.amsgrad]
            carried = carried + ranks.total(maxima, 1)[0]
        return Sums(grad_sq, carried, fresh, count)

    def sums_of_parts(self, parts: Iterable[Description], ranks: Collective, has_amsgrad: bool) -> Sums:
        """Does what `sums` does without a gate, where only one part of the model is described at a time."""
        rows, maxima = [], []
        for bucket in chain.from_iterable(part.buckets for part in parts):
            rows.append((bucket.sharding, self._row(bucket)))
            if bucket.amsgrad:
                maxima.append(_maxima(bucket, None))
        grad_sq, carried, fresh, count = ranks.total(rows, 4).unbind()
        if has_amsgrad:
            carried = carried + ranks.total(maxima, 1)[0]
        return Sums(grad_sq, carried, fresh, count)

    def leave(self, *_: object) -> None:
        pass

    def _row(self, bucket: Bucket) -> Tensor:
        sums = bucket.backend.pass1(bucket)
        if bucket.amsgrad:  # the recursion of each element holds for sums, but not for maxima
            sums = torch.cat([sums[:1], torch.zeros_like(sums[1:])])
        return torch.cat([sums, bucket.count.reshape(1)])


def _maxima(bucket: Bucket, grad_factor: Tensor | None) -> tuple[Sharding, Tensor]:
    return bucket.sharding, bucket.backend.pass1_amsgrad(bucket, grad_factor).reshape(1)


class Left(NamedTuple):
    """Holds what the step before has left, over all ranks."""

    row: Tensor  # the sum of v^, its number of elements, the sum of squared gradients
    has_stepped: bool | None  # whether any step was taken. None: only the device knows


class StepBefore:
    """Takes v^ as the state has it before this step, over all parameters that have taken a step.

    So the mean follows from the state alone: it does not depend on which gradients come and go, on skipped steps, on a
    resume. As long as no parameter has taken a step, pass 1 takes its place.

    On several ranks the sums travel while the model computes: a step starts the reduction for the next one. Whoever
    writes to the state in between must do so on all ranks.
    """

    def __init__(self, pass_one: PassOne) -> None:
        self._pass_one = pass_one
        self._reduction: Reduction | None = None
        self._left: Left | None = None  # by the step before, if someone has asked for it already

    def sums(self, step: Description, gate: Gate) -> Sums:
        left, self._left = self._left or self._received(step.buckets, step.ranks), None
        carried, count, self._last_grad_sq = left.row.unbind()
        before = Sums(None, carried, torch.zeros_like(carried), count)
        if left.has_stepped is not None:
            return before if left.has_stepped else self._pass_one.sums(step, gate)
        # The device knows whether any step was taken, and is not waited for.
        now = self._pass_one.sums(step, gate)
        pairs = zip(before[1:], now[1:], strict=True)
        return Sums(now.grad_sq, *(torch.where(count > 0, old, new) for old, new in pairs))

    def has_stepped(self, buckets: Sequence[Bucket], ranks: Collective) -> bool:
        """Returns whether any parameter of any rank has taken a step. Waits for the device where only that knows."""
        self._left = self._left or self._received(buckets, ranks)
        if self._left.has_stepped is None:
            self._left = self._left._replace(has_stepped=bool(self._left.row[1] > 0))
        return bool(self._left.has_stepped)

    def first_sums(self, parts: Iterable[Description], ranks: Collective, has_amsgrad: bool) -> Sums:
        """Returns the sums of a first step, for which pass 1 takes the place of a step before."""
        self._left = None
        return self._pass_one.sums_of_parts(parts, ranks, has_amsgrad)

    def sums_of_others(self) -> Sums:
        """Returns the sums where this rank has taken no step yet, but others have, as `has_stepped` has found."""
        left, self._left = self._left, None
        assert left is not None, "has_stepped comes first"
        carried, count, self._last_grad_sq = left.row.unbind()
        return Sums(None, carried, torch.zeros_like(carried), count)

    def _received(self, buckets: Sequence[Bucket], ranks: Collective) -> Left:
        reduction, self._reduction = self._reduction, None  # gone even if a rank has died and `finish` raises
        if reduction is None:
            row = ranks.total([(bucket.sharding, _left_by(bucket)) for bucket in buckets], 3)
        else:
            row = reduction.finish()
        if _can_be_read(row):
            return Left(row, bool(row[1] > 0))
        is_known = reduction is not None or (
            ranks.is_local and any(bucket.find_whether_stepped() for bucket in buckets)
        )
        return Left(row, True if is_known else None)

    def grad_norm(self, grad_sqs: Sequence[Tensor], gate: Gate, ranks: Collective) -> Tensor:
        """Returns the norm, where pass 2 was the first to read gradients: on several ranks that of the step before."""
        if not ranks.is_local:
            return self._last_grad_sq.sqrt()
        return gate.grad_norm(torch.stack([to_device(grad_sq, ranks.device) for grad_sq in grad_sqs]).sum())

    def leave(self, step: Description, grad_sqs: Sequence[Tensor], gate: Gate, skip: Tensor | None) -> None:
        if step.ranks.is_local:  # the next step finds all it needs in the buckets
            return
        rows = []
        for bucket, grad_sq in zip(step.buckets, grad_sqs, strict=True):
            unscale = gate.unscale(bucket.device)
            grad_sq = grad_sq if unscale is None else unscale.square() * grad_sq
            rows.append((bucket.sharding, _left_by(bucket, grad_sq)))
        self._reduction = step.ranks.start(rows, 3)

    def leave_released(self, step: Description, grad_sqs: Mapping[Sharding, Tensor]) -> None:
        """Does what `leave` does after a step whose parameters were updated one after another."""
        if step.ranks.is_local:
            return
        rows = [(bucket.sharding, _left_by(bucket)) for bucket in step.buckets]
        for sharding, grad_sq in grad_sqs.items():
            rows.append((sharding, torch.stack([torch.zeros_like(grad_sq), torch.zeros_like(grad_sq), grad_sq])))
        self._reduction = step.ranks.start(rows, 3)

    def forget(self) -> None:
        """Drops what the step before left. All ranks must do so, or none."""
        reduction, self._reduction, self._left = self._reduction, None, None
        if reduction is not None:
            reduction.abandon()


def _can_be_read(value: Tensor) -> bool:
    """Whether the host can look at a value without waiting for a device."""
    return value.is_cpu and not is_fake(value)


def _left_by(bucket: Bucket, grad_sq: Tensor | None = None) -> Tensor:
    total, _, count = bucket.backend.carried(bucket, after_this_step=False).unbind()
    return torch.stack([total, count, torch.zeros_like(total) if grad_sq is None else grad_sq])


class FromCaller:
    """Takes the sum of squared gradients from the caller, for a step of all that it covers, on all ranks.

    Exact where all parameters have taken equally many steps. Where not, the squared gradients count as spread evenly.
    """

    def __init__(self, grad_sq: Tensor) -> None:
        self._grad_sq = grad_sq

    def sums(self, step: Description, gate: Gate) -> Sums:
        rows = [(bucket.sharding, bucket.backend.carried(bucket, after_this_step=True)) for bucket in step.buckets]
        carried, weight, count = step.ranks.total(rows, 3).unbind()
        return Sums(self._grad_sq, carried, self._grad_sq * weight / count.clamp(min=1), count)

    def leave(self, *_: object) -> None:
        pass


class FromCallerInParts:
    """Takes the sum of squared gradients and its number of elements from the caller, where a call may step only some of
    them: wrappers step one group at a time.

    Only the sum of v is carried from step to step, without communication. So all its elements must have a gradient in
    each step. Calls belong to the same step until a parameter comes again.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Starts again from the state, after steps of another kind."""
        self._sum: Tensor | None = None  # of v, before the step that calls belong to
        self._steps: Tensor | None = None
        self._next: tuple[Tensor, Tensor] | None = None  # both, after it
        self._stepped: set[int] = set()
        self.is_begun = False
        self.is_same_step = False  # whether the last call belongs to the same step as the one before

    def begin(
        self,
        grad_sq: Tensor,
        numel: int,
        beta2: float,
        bias_correction: bool,
        params: Sequence[Tensor],
        stored: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        """Takes up a call. `stored()` returns the sum of v and the steps taken as the state has them, on all ranks."""
        ids, self.is_begun = set(map(id, params)), True
        self.is_same_step = self._next is not None and self._stepped.isdisjoint(ids)
        self._stepped = self._stepped | ids if self.is_same_step else ids
        if not self.is_same_step:
            self._sum, self._steps = self._next or stored()
        self._grad_sq, self._numel, self._beta2, self._bias_correction = grad_sq, numel, beta2, bias_correction

    def sums(self, step: Description, gate: Gate) -> Sums:
        assert self._sum is not None, "begin comes first"
        assert self._steps is not None, "begin comes first"
        if not gate.may_skip:  # a step that is skipped would leave none
            for bucket in step.buckets:
                bucket.allow_missing_sums()
        bias_correction2 = 1 - self._bias_correction * self._beta2 ** (self._steps + 1)
        carried = self._beta2 * self._sum / bias_correction2
        fresh = (1 - self._beta2) * self._grad_sq / bias_correction2
        return Sums(self._grad_sq, carried, fresh, torch.full_like(carried, self._numel))

    def leave(self, step: Description, grad_sqs: Sequence[Tensor], gate: Gate, skip: Tensor | None) -> None:
        assert self._sum is not None, "begin comes first"
        assert self._steps is not None, "begin comes first"
        factor = gate.grad_factor(self._grad_sq, step.ranks.device)
        grad_sq = self._grad_sq if factor is None else factor.square() * self._grad_sq
        after = self._beta2 * self._sum + (1 - self._beta2) * grad_sq
        if skip is None:
            self._next = after, self._steps + 1
        else:
            self._next = torch.where(skip != 0, self._sum, after), self._steps + 1 - skip


def stored_sum(states: Sequence[tuple[Sharding, Mapping[str, Any]]], ranks: Collective) -> tuple[Tensor, Tensor]:
    """Returns the sum of v on all ranks, and the most steps that any parameter here has taken."""
    device, dtype = ranks.device, scalar_dtype(ranks.device)
    rows = []
    for sharding, state in states:
        moment = decoded_moment(state, "exp_avg_sq")
        moment = torch.view_as_real(moment) if moment.is_complex() else moment
        rows.append((sharding, moment.sum(dtype=dtype).reshape(1).to(device)))
    steps = [torch.zeros((), dtype=dtype, device=device), *(state["step"].to(device, dtype) for _, state in states)]
    return ranks.total(rows, 1)[0], torch.stack(steps).max()


def provided(given: object) -> tuple[Any, Any]:
    """Returns what a `grad_sumsq_provider` has returned: grad_sumsq and numel, as `step` takes them."""
    if not (isinstance(given, tuple) and len(given) == 2):
        raise ValueError(
            f"grad_sumsq_provider returned {given!r}, wanted a pair: what step takes as grad_sumsq, and as numel or "
            "None."
        )
    return given


def refuse_numel_alone(numel: object) -> NoReturn:
    raise ValueError(f"step got numel={numel} without grad_sumsq, wanted both: it says how many have that sum.")


def checked_grad_sq(
    grad_sumsq: float | Tensor,
    numel: int | None,
    groups: Sequence[Mapping[str, Any]],
    schedule: str,
    device: torch.device,
    may_skip: bool,
) -> Tensor:
    """Returns the caller's sum of squared gradients as a tensor, after checking that it can be used.

    NaN is what bad gradients have, and only for steps that may be skipped. A sum on a GPU is not waited for.
    """
    if isinstance(grad_sumsq, Tensor):
        if is_dtensor(grad_sumsq):  # the square of what clip_grad_norm_ returns for sharded models
            grad_sumsq = full_tensor(grad_sumsq)
        if grad_sumsq.numel() != 1:
            raise ValueError(f"step got grad_sumsq of shape {tuple(grad_sumsq.shape)}, wanted one number.")
        value = grad_sumsq.detach().reshape(())
        number = float(value) if _can_be_read(value) else 0.0
        value = to_device(value, device, scalar_dtype(device))
    elif isinstance(grad_sumsq, Real) and not isinstance(grad_sumsq, bool):
        number = float(grad_sumsq)
        value = torch.full((), number, dtype=scalar_dtype(device), device=device)
    else:
        number = -1.0
    if not (number >= 0 or (may_skip and math.isnan(number))):
        raise ValueError(
            f"step got grad_sumsq={grad_sumsq!r}, wanted a number >= 0, the square of the gradients' norm. NaN is for "
            "optimizers that may skip a step: skip_nonfinite=True."
        )
    if numel is not None and (isinstance(numel, bool) or not isinstance(numel, int) or numel <= 0):
        raise ValueError(f"step got numel={numel!r}, wanted the number of elements that grad_sumsq is the sum over.")
    if schedule == "lagged":
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
    return value


def skip_on_all_ranks(gate: Gate, grad_sq: Tensor | None, ranks: Collective) -> Tensor | None:
    """Returns 1 if the step must change nothing: where any rank has found an infinity all of them skip, on meshes that
    GradScaler does not know of too."""
    if not gate.may_skip:
        return None
    found = gate.found(ranks.device)
    return gate.skip(found if gate.found_inf is None else ranks.largest(found), grad_sq)


def on_device_of(bucket: Bucket, value: Tensor | None) -> Tensor | None:
    return None if value is None else to_device(value, bucket.device)
