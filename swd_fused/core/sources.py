"""The sources of a step's four sums: pass 1, the step before, or the caller."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from swd_fused.checks import is_number, is_whole
from swd_fused.core.bucket import Bucket
from swd_fused.core.schedule import Gate, Sums
from swd_fused.core.snapshot import Snapshot, State
from swd_fused.core.values import Groups
from swd_fused.devices.transfer import can_be_read, from_host, on_device, scalar_dtype, to_device
from swd_fused.distributed.collective import Collective, Reduction, collective_of
from swd_fused.distributed.sharding import ShardedOver, Sharding, is_dtensor, sharding_in
from swd_fused.options import Options
from swd_fused.state.storage import decoded_moment, has_moments

if TYPE_CHECKING:
    from swd_fused.core.step import Step


class Source:
    """Provides the four sums of a step. All ranks must use the same source, whatever gradients and state each has."""

    at_once: Literal["exact", "lagged"] | None = None  # the schedule with which one call can step a single bucket
    is_given = False  # whether the caller passed the sum of squared gradients, over all ranks
    continues = False  # whether this call continues a step that another call has begun

    def is_known(self, snapshot: Snapshot) -> bool:
        """Returns whether the mean is known before all gradients are. May wait for the device."""
        return True

    def sums(self, snapshot: Snapshot, gate: Gate) -> Sums:
        """Returns the sums over all ranks. Leaves parameters, gradients and state as they are."""
        raise NotImplementedError

    def grad_norm(self, step: Step) -> Tensor:
        """Returns the gradients' norm for a step whose gradients were not summed before the update."""
        raise NotImplementedError

    def leave(self, step: Step) -> None:
        """Keeps the sums that the next step needs."""

    def refuse_capture(self, snapshot: Snapshot) -> None:
        """Raises if a step from this source cannot be captured in a CUDA graph."""


class PassOne(Source):
    """Computes the sums by reading this step's gradients: pass 1."""

    at_once = "exact"

    def is_known(self, snapshot: Snapshot) -> bool:
        return False

    def sums(self, snapshot: Snapshot, gate: Gate) -> Sums:
        ranks = snapshot.ranks
        rows = [(bucket.sharding, self._row(bucket)) for bucket in snapshot.buckets]
        grad_sq, carried, fresh, count = ranks.total(rows, 4).unbind()
        if snapshot.has_amsgrad:  # asked of the groups, so that all ranks agree whatever tensors each has
            factor = gate.grad_factor(grad_sq, ranks.device)
            maxima = [
                (bucket.sharding, bucket.backend.pass1_amsgrad(bucket, on_device(factor, bucket.device)).reshape(1))
                for bucket in snapshot.buckets
                if bucket.amsgrad
            ]
            carried = carried + ranks.total(maxima, 1)[0]
        return Sums(grad_sq, carried, fresh, count)

    def _row(self, bucket: Bucket) -> Tensor:
        sums = bucket.backend.pass1(bucket)
        if bucket.amsgrad:  # sums follow the recursion of their elements, but sums of maxima do not
            sums = torch.cat([sums[:1], torch.zeros_like(sums[1:])])
        return torch.cat([sums, bucket.count.reshape(1)])


class Left(NamedTuple):
    """Holds the sums that the step before has left, over all ranks."""

    row: Tensor  # the sum of v^, its number of elements, the sum of squared gradients
    has_stepped: bool | None  # whether any step was taken; None if only the device knows


class StepBefore(Source):
    """Takes the sum of v^ from the state before this step, over all parameters that have taken a step.

    So the mean follows from the state alone: missing gradients, skipped steps and resuming a run do not change it. Pass
    1 is used until some parameter has taken a step.

    On several ranks the sums travel while the model computes: each step starts the reduction for the next one. Code
    that writes to the state in between must do so on all ranks.
    """

    at_once = "lagged"

    def __init__(self, pass_one: PassOne) -> None:
        self._pass_one = pass_one
        self._reduction: Reduction | None = None
        self._left: Left | None = None  # received by `is_known`, for `sums` to take

    def is_known(self, snapshot: Snapshot) -> bool:
        """Returns whether any parameter of any rank has taken a step."""
        self._left = self._left or self._received(snapshot)
        if self._left.has_stepped is None:
            self._left = self._left._replace(has_stepped=bool(self._left.row[1] > 0))
        return bool(self._left.has_stepped)

    def sums(self, snapshot: Snapshot, gate: Gate) -> Sums:
        left, self._left = self._left or self._received(snapshot), None
        carried, count, self._last_grad_sq = left.row.unbind()
        before = Sums(None, carried, torch.zeros_like(carried), count)
        if left.has_stepped is not None:
            return before if left.has_stepped else self._pass_one.sums(snapshot, gate)
        # Only the device knows whether any step was taken, so it chooses: reading the answer would wait for it.
        now = self._pass_one.sums(snapshot, gate)
        pairs = zip(before[1:], now[1:], strict=True)
        return Sums(now.grad_sq, *(torch.where(count > 0, old, new) for old, new in pairs))

    def _received(self, snapshot: Snapshot) -> Left:
        ranks, buckets = snapshot.ranks, snapshot.buckets
        reduction, self._reduction = self._reduction, None  # before `finish`, which raises if a rank has died
        if reduction is None:
            row = ranks.total([(bucket.sharding, _left_by(bucket)) for bucket in buckets], 3)
        else:
            row = reduction.finish()
        if can_be_read(row):
            return Left(row, bool(row[1] > 0))
        is_known = reduction is not None or (
            ranks.is_local and any(bucket.find_whether_stepped() for bucket in buckets)
        )
        return Left(row, True if is_known else None)

    def grad_norm(self, step: Step) -> Tensor:
        """Returns the norm that the update summed; on several ranks, the norm of the step before."""
        ranks = step.ranks
        if not ranks.is_local:
            return self._last_grad_sq.sqrt()
        zero = torch.zeros((), dtype=scalar_dtype(ranks.device), device=ranks.device)
        return step.gate.grad_norm(torch.stack([zero, *step.grad_sqs.values()]).sum())

    def leave(self, step: Step) -> None:
        if step.ranks.is_local:  # the next step finds all it needs in the buckets
            return
        rows = [(bucket.sharding, _left_by(bucket)) for bucket in step.buckets]
        unscale = step.gate.unscale(step.ranks.device)
        for sharding, grad_sq in step.grad_sqs.items():
            grad_sq = grad_sq if unscale is None else unscale.square() * grad_sq
            rows.append((sharding, torch.stack([torch.zeros_like(grad_sq), torch.zeros_like(grad_sq), grad_sq])))
        self._reduction = step.ranks.start(rows, 3)

    def forget(self) -> None:
        """Drops the sums that the step before left. All ranks must do so, or none."""
        reduction, self._reduction, self._left = self._reduction, None, None
        if reduction is not None:
            reduction.abandon()

    def refuse_capture(self, snapshot: Snapshot) -> None:
        if not snapshot.ranks.is_local:
            raise RuntimeError(
                "FusedAdamS got a step that needs one pass, over several ranks, in the capture of a CUDA graph: the "
                'sums of the step before are on their way between the ranks. Use schedule="exact" and '
                'decay="scheduled".'
            )


def _left_by(bucket: Bucket) -> Tensor:
    total, count = bucket.backend.last_sum(bucket).unbind()
    return torch.stack([total, count, torch.zeros_like(total)])


# --- Sums from the caller


class FromCaller(Source):
    """Takes the sum of squared gradients from the caller, for one step of all gradients in the sum, on all ranks.

    The mean is exact if all parameters have taken equally many steps. Else it takes gradients as spread evenly.
    """

    is_given = True

    def __init__(self, grad_sq: Tensor) -> None:
        self._grad_sq = grad_sq

    def sums(self, snapshot: Snapshot, gate: Gate) -> Sums:
        rows = [(bucket.sharding, _carried_by(bucket)) for bucket in snapshot.buckets]
        carried, weight, count = snapshot.ranks.total(rows, 3).unbind()
        return Sums(self._grad_sq, carried, self._grad_sq * weight / count.clamp(min=1), count)


def _carried_by(bucket: Bucket) -> Tensor:
    """Returns three sums over tensors with a gradient: of what v^ keeps from earlier steps, of the weights of squared
    gradients in v^, and of elements."""
    beta2 = bucket.hyper.column("beta2")[bucket.groups]
    corrections = bucket.hyper.bias_correction("beta2", bucket.groups, bucket.steps + 1)
    carried = bucket.backend.weighted_sum(bucket, torch.where(bucket.has_grad, beta2 / corrections, 0.0))
    fresh = torch.where(bucket.has_grad, (1 - beta2) * bucket.numels / corrections, 0.0).sum()
    return torch.stack([carried, fresh, bucket.count])


class FromCallerInParts(Source):
    """Takes the sum of squared gradients and its number of elements from the caller, who may step only some of these
    elements in a call: wrappers step one group at a time.

    Only the sum of v is carried from step to step, without communication. So all its elements must have a gradient in
    each step. Calls belong to the same step until a parameter recurs.
    """

    is_given = True
    _sum: Tensor  # the sum of v before the present step
    _steps: Tensor

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops the carried sum, after steps of another kind: the next call computes it from the state."""
        self._next: tuple[Tensor, Tensor] | None = None  # sum and steps after the present step
        self._stepped: set[int] = set()
        self.is_begun = False
        self.continues = False

    def take_up(
        self, grad_sq: Tensor, numel: int, groups: Groups, state: State, over: ShardedOver | None
    ) -> FromCallerInParts:
        """Takes up a call's sum, and the groups and state from which to compute the sum of v if none is carried."""
        self.is_begun = True
        self._grad_sq, self._numel = grad_sq, numel
        self._beta2, self._bias_correction = float(groups[0]["betas"][1]), groups[0]["bias_correction"]
        self._stored = groups, state, over
        return self

    def sums(self, snapshot: Snapshot, gate: Gate) -> Sums:
        if any(bucket.is_stepped_by_graphs() for bucket in snapshot.buckets):
            raise RuntimeError(
                "FusedAdamS got step(grad_sumsq=, numel=) after steps of a CUDA graph, which the carried sum of the "
                "whole model would leave out. Leave out numel, and step all parameters at once."
            )
        ids = set(map(id, snapshot.params_with_grad()))
        self.continues = self._next is not None and self._stepped.isdisjoint(ids)
        self._stepped = self._stepped | ids if self.continues else ids
        if not self.continues:
            before = self._next or stored_sum(*self._stored)
            self._sum, self._steps = (to_device(each, self._grad_sq.device) for each in before)
        if not gate.may_skip:  # a skipped update would leave the placeholder sums in place
            for bucket in snapshot.buckets:
                bucket.allow_missing_sums()
        bias_correction2 = 1 - self._bias_correction * self._beta2 ** (self._steps + 1)
        carried = self._beta2 * self._sum / bias_correction2
        fresh = (1 - self._beta2) * self._grad_sq / bias_correction2
        return Sums(self._grad_sq, carried, fresh, torch.full_like(carried, self._numel))

    def leave(self, step: Step) -> None:
        factor, skip = step.grad_factor, step.skip
        grad_sq = self._grad_sq if factor is None else factor.square() * self._grad_sq
        after = self._beta2 * self._sum + (1 - self._beta2) * grad_sq
        if skip is None:
            self._next = after, self._steps + 1
        else:
            self._next = torch.where(skip != 0, self._sum, after), self._steps + 1 - skip

    def refuse_capture(self, snapshot: Snapshot) -> None:
        raise RuntimeError(
            "FusedAdamS got step(grad_sumsq=, numel=) in the capture of a CUDA graph, where the sum of the whole model "
            "cannot be carried on. Leave out numel, and step all parameters at once."
        )


def stored_sum(groups: Groups, state: State, over: ShardedOver | None) -> tuple[Tensor, Tensor]:
    """Returns the sum of v over all state on all ranks, not just over the group that a wrapper shows, and the largest
    step count of any parameter on this rank."""
    group_of = {param: group for group in groups for param in group["params"]}
    params = [
        (param, group_of.get(param, {}))
        for param, entry in state.items()
        if isinstance(param, Tensor) and has_moments(entry)
    ]
    ranks: Collective = collective_of(params, over)
    device, dtype = ranks.device, scalar_dtype(ranks.device)
    rows: list[tuple[Sharding, Tensor]] = []
    steps = [torch.zeros((), dtype=dtype, device=device)]
    for param, group in params:
        moment = decoded_moment(state[param], "exp_avg_sq")
        moment = torch.view_as_real(moment) if moment.is_complex() else moment
        rows.append((sharding_in(group, param, over), moment.sum(dtype=dtype).reshape(1).to(device)))
        steps.append(state[param]["step"].to(device, dtype))
    return ranks.total(rows, 1)[0], torch.stack(steps).max()


class StepCall(NamedTuple):
    """Holds the arguments of `optimizer.step()`, and the attributes that GradScaler sets for it."""

    grad_sumsq: float | Tensor | None = None
    numel: int | None = None
    grad_scale: Tensor | None = None  # from GradScaler
    found_inf: Tensor | None = None  # from GradScaler

    def checked_grad_sq(self, groups: Groups, options: Options, device: torch.device) -> Tensor:
        """Returns the sum of squared gradients as a tensor, after checking that it can be used.

        Bad gradients make the sum NaN, which only steps that may be skipped accept. A sum on a GPU is not read.
        """
        given, numel = self.grad_sumsq, self.numel
        if isinstance(given, Tensor):  # clip_grad_norm_ returns a DTensor for a sharded model
            whole: Any = given
            given = (whole.full_tensor() if is_dtensor(whole) else whole).detach()
        if not self._is_sum(given, options.skip_nonfinite):
            raise ValueError(
                f"step got grad_sumsq={given!r}, wanted one number >= 0, the square of the gradients' norm. NaN is for "
                "optimizers that may skip a step: skip_nonfinite=True."
            )
        if numel is not None and not is_whole(numel, 1):
            raise ValueError(f"step got numel={numel!r}, wanted how many elements grad_sumsq is the sum over.")
        _check_use_of_sum(groups, options)
        if isinstance(given, Tensor) and not given.is_cpu:
            return to_device(given.reshape(()), device, scalar_dtype(device))
        return from_host(torch.as_tensor(given, dtype=scalar_dtype(device), device="cpu").reshape(()), device)

    def _is_sum(self, given: object, skips_nonfinite: bool) -> bool:
        if isinstance(given, Tensor):
            if given.numel() != 1 or not can_be_read(given):
                return given.numel() == 1
            given = float(given)
        may_be_nan = skips_nonfinite or self.found_inf is not None
        return (is_number(given) and given >= 0) or (may_be_nan and isinstance(given, float) and math.isnan(given))


def _check_use_of_sum(groups: Groups, options: Options) -> None:
    """Refuses a sum of squared gradients with options for which it does not determine the mean."""
    problem = None
    if options.schedule == "lagged":
        problem = 'schedule="lagged", which looks at no gradient of this step. Use "exact", which reads no more with it'
    elif any(group["amsgrad"] for group in groups):
        problem = "amsgrad=True, whose maxima do not follow from it. Call step() without"
    elif len({(float(group["betas"][1]), group["bias_correction"]) for group in groups}) > 1:
        problem = "groups of different betas or bias_correction, whose shares of it are unknown. Call step() without"
    if problem is not None:
        raise ValueError(f"step got grad_sumsq with {problem}.")
