"""One step: begun, given gradients once or several times, and ended. All steps are taken this way."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the conversions to enums that `signal` adds, which take longer than the calls
import math
from itertools import chain, repeat
from operator import attrgetter, is_not
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused.core.bucket import Bucket
from swd_fused.core.schedule import Gate, StepScalars
from swd_fused.core.snapshot import Inputs, Snapshot, State
from swd_fused.core.sources import Source, StepCall
from swd_fused.core.values import PARAMS, Groups
from swd_fused.devices import graphs
from swd_fused.devices.transfer import can_be_read, on_device, to_device
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.refusals import refuse_scaler
from swd_fused.distributed.sharding import Sharding, is_distributed

if TYPE_CHECKING:
    from swd_fused.core.stepper import Stepper


GRAD = attrgetter("grad")


class Step:
    """A step of some groups. `update` takes the gradients that are there, once or, in the backward pass, many times.

    The schedule's mean is found in the first update and holds for the others. `is_partial` says that more gradients are
    to come.
    """

    buckets: list[Bucket]  # these two are known after the first update
    ranks: Collective
    results: StepScalars | Tensor  # known at the end
    skip: Tensor | None = None  # not 0 if the step changes nothing; None if it could not be skipped
    mean: Tensor | None = None
    grad_factor: Tensor | None = None
    grad_sqs: dict[Sharding, Tensor]  # of squared gradients, where the update was the first to sum them
    is_partial = False
    interrupts: DeferredInterrupts | None = None  # from when something is written; to be delivered after the end
    _is_captured = False
    _snapshot: Snapshot | None = None
    _at_once: Tensor | None = None  # the results, if one call has taken the whole step
    _grad_sq: Tensor | None = None

    def __init__(self, stepper: Stepper, groups: Groups, state: State, source: Source, gate: Gate) -> None:
        """Reads the groups, and lets observers of earlier steps warn."""
        values = stepper.values
        if values is None or not values.hold(groups):
            values = stepper.new_values(groups)
        for observer in stepper.concerned:
            if observer.is_due:
                values = stepper.let_speak(groups)
                break
        if values.tensor_lrs:
            values.begin()
        self.groups, self.source, self.gate = groups, source, gate
        self._stepper, self._state, self._values = stepper, state, values

    @property
    def number(self) -> int:
        """How many steps were taken before and with it, since training or a resumed run began."""
        return self._stepper.steps_taken

    @property
    def is_continued(self) -> bool:
        """Whether it goes on with the step that another call has begun."""
        return self.source.continues

    def update(self, params: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Steps the parameters that have a gradient. Refuses what it cannot do before anything is written.

        Returns False, having written nothing, if the mean needs all gradients and more are to come.
        """
        stepper = self._stepper
        has_grads = any(map(is_not, grads, repeat(None)))
        if not has_grads and not is_distributed():
            return True
        options, over = stepper.options_of_tensors, stepper.sharded_over
        inputs = Inputs(options, over, self.groups, self._values.kinds, self._state, params, grads)
        snapshot = stepper.latest
        if snapshot is None or not snapshot.holds(inputs):
            snapshot = stepper.snapshot(inputs)
        try:
            if not has_grads and snapshot.ranks.is_local and self._snapshot is None:
                return True
            if snapshot.may_have_unknown_shards and not self.source.is_given and stepper.options.uses_sums:
                snapshot.refuse_unknown_shards()
            if self.gate.found_inf is not None and not snapshot.ranks.is_local:
                refuse_scaler(params, snapshot.ranks)
            if snapshot.gpus and graphs.is_capturing_on(snapshot.gpus):
                snapshot = self._for_capture(snapshot)
            snapshot.begin(self._values)
            self.buckets, self.ranks = snapshot.buckets, snapshot.ranks
            if self.mean is None and self.is_partial and not self.source.is_known(snapshot):
                return False
            bucket = snapshot.only_bucket
            is_judged = stepper.options.outliers is not None  # by device operations between the passes
            if bucket is not None and self.mean is None and not (self.is_partial or is_judged):
                # One call that nothing has to be counted after cannot be interrupted.
                if not bucket.backend.is_atomic or stepper.counts_steps or self.gate.may_skip:
                    self._defer_interrupts()
                self._at_once = self._take_at_once(bucket)
            if self._at_once is None:
                self._defer_interrupts()
                self._update_buckets(snapshot)
            self._snapshot = snapshot  # not before: without a mean there is nothing to end
        finally:
            snapshot.end()
            if self._is_captured:
                stepper.keep_for_graphs(graphs.kept())
        return True

    def _defer_interrupts(self) -> None:
        """Puts off Ctrl-C until whoever takes the step has ended it, and lets `interrupts` deliver."""
        if self.interrupts is None:
            self.interrupts = DeferredInterrupts()

    def deliver_interrupts(self) -> None:
        """Calls the handler of an interrupt that was put off."""
        interrupts, self.interrupts = self.interrupts, None
        if interrupts is not None:
            interrupts.deliver()

    def _update_buckets(self, snapshot: Snapshot) -> None:
        ranks, gate = self.ranks, self.gate
        if self.mean is None:
            self.grad_sqs = {}
            sums = self.source.sums(snapshot, gate)
            self._grad_sq = sums.grad_sq
            self.grad_factor = gate.grad_factor(sums.grad_sq, ranks.device)
            self.mean = sums.mean(self.grad_factor, self._stepper.options.total_numel)
            if gate.may_skip:
                self.skip = gate.skip(gate.found(ranks.device), sums.grad_sq)
        for bucket in self.buckets:
            if not bucket.has_some_grads:
                continue
            mean, sum_grads = to_device(self.mean, bucket.device), self.source.at_once == "lagged"
            factor, skip = on_device(self.grad_factor, bucket.device), on_device(self.skip, bucket.device)
            grad_sq = to_device(bucket.backend.pass2(bucket, mean, factor, skip, sum_grads), ranks.device)
            before = self.grad_sqs.get(bucket.sharding)
            self.grad_sqs[bucket.sharding] = grad_sq if before is None else before + grad_sq

    def _take_at_once(self, bucket: Bucket) -> Tensor | None:
        """Takes both passes as one call, if the bucket's backend offers that for this source.

        Returns StepScalars as one tensor: taking it apart takes longer than a small step needs for its sums.
        """
        how, gate = self.source.at_once, self.gate
        if how == "lagged" and not (bucket.has_stepped or bucket.find_whether_stepped()):
            how = "exact" if bucket.device.type == "cpu" else None  # a first step is exact
        if how is None:
            return None
        if gate.grad_scale is not None or gate.found_inf is not None:
            gate = gate.on(bucket.device)
        return bucket.backend.step(bucket, gate, how == "lagged")

    def _for_capture(self, snapshot: Snapshot) -> Snapshot:
        """Returns the snapshot of a step that is captured in a CUDA graph, after checking that it can be."""
        self.source.refuse_capture(snapshot)
        self.buckets, self.ranks = snapshot.buckets, snapshot.ranks
        self._stepper.refuse_capture(self)
        for observer in self._stepper.concerned:
            observer.refuse_capture(self)
        captured = snapshot.for_capture()
        for bucket in snapshot.buckets:  # only the copies need the gradients
            bucket.grads = []
        self._is_captured = True
        return captured

    def end(self) -> None:
        """Leaves what the next step needs, and tells those who want to know. Does nothing if nothing had a gradient."""
        snapshot, stepper, gate = self._snapshot, self._stepper, self.gate
        if snapshot is None:
            return
        results: StepScalars | Tensor | None = self._at_once
        if results is None:
            assert self.mean is not None
            norm = self.source.grad_norm(self) if self._grad_sq is None else gate.grad_norm(self._grad_sq)
            results = StepScalars(self.mean, norm, self.skip)
            self.source.leave(self)
        elif gate.may_skip:
            self.skip = results[2]
        self.results = stepper.last = results
        if self._is_captured or stepper.last_of_graphs is not None:
            stepper.leave_last_to_graphs(results)
        stepper.steps_taken += 1
        if self._values.followed:
            self._values.count_lrs(self.groups)
        if self.skip is not None and not self.source.continues:
            stepper.count_skipped(self.skip)
        for bucket in snapshot.buckets:
            if bucket.follows_params or not bucket.has_stepped:
                bucket.note_step(gate.may_skip)
        if self._is_captured:
            stepper.keep_for_graphs(snapshot)
        if stepper.concerned:
            mean = results.tolist()[0] if type(results) is Tensor and results.is_cpu else self._readable_mean()
            is_harmless = mean >= self._values.harmless_mean
            for observer in stepper.concerned:
                if not (is_harmless and observer.needs_small_mean):
                    observer.note(self)

    def _readable_mean(self) -> float:
        """Returns the mean, or NaN if the host cannot look at it without waiting."""
        return float(self.results[0]) if can_be_read(self.results[0]) else math.nan


def take(stepper: Stepper, groups: Groups, state: State, grads: list[Tensor | None] | None, call: StepCall) -> None:
    """Takes a step of all groups with these gradients, or with those that the parameters have."""
    if torch.is_inference_mode_enabled():  # state that is made in inference mode could never be written to outside
        with torch.inference_mode(False), torch.no_grad():
            return take(stepper, groups, state, grads, call)
    skips_nonfinite = stepper.options.skip_nonfinite
    may_skip = call.found_inf is not None or skips_nonfinite
    gate = Gate(stepper.options.max_grad_norm, call.grad_scale, call.found_inf, skips_nonfinite, may_skip)
    step = Step(stepper, groups, state, stepper.source, gate)
    params = list(chain.from_iterable(map(PARAMS, groups)))
    if grads is None:
        grads = list(map(GRAD, params))
    if call.grad_sumsq is not None or stepper.in_parts.is_begun:
        step.source = stepper.source_for(call, groups, state)
    if stepper.options.outliers is not None:
        step.gate = stepper.seams.judge.gate(step)
    try:
        step.update(params, grads)
        step.end()
    finally:
        if step.interrupts is not None:
            step.deliver_interrupts()
    return None


class DeferredInterrupts:
    """Puts off Ctrl-C from when it is made until `deliver`: in the middle of a step some parameters would be updated
    and some not, or all of them, but the step not yet counted.

    The handler of SIGINT, which raises KeyboardInterrupt unless the user has set another, is called then. Only the main
    thread gets signals. To exchange handlers takes 1.3 us; a mask of signals would not keep them from threads of torch,
    through which they reach the main thread all the same.
    """

    __slots__ = ("_handler", "_received")

    def __init__(self) -> None:
        handler: Any = _signal.getsignal(_signal.SIGINT)
        self._handler = handler if callable(handler) and current_thread() is main_thread() else None
        self._received: tuple[Any, ...] | None = None
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._receive)

    def _receive(self, *signal: Any) -> None:
        self._received = signal

    def deliver(self) -> None:
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)
            if self._received is not None:
                self._handler(*self._received)
