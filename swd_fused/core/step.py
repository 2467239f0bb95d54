"""One step: begun, given gradients once or several times, and ended; and everything kept from step to step.

All steps are taken this way, wherever their gradients and sums come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.core.bucket import Bucket
from swd_fused.core.interrupts import DeferredInterrupts
from swd_fused.core.schedule import Gate
from swd_fused.core.snapshot import Choose, Inputs, Snapshot, State
from swd_fused.core.sources import FromCaller, FromCallerInParts, PassOne, Source, StepBefore, StepCall
from swd_fused.core.values import PARAMS, Decay, Groups, GroupValues
from swd_fused.devices import graphs
from swd_fused.devices.transfer import from_host, on_device, to_device
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.refusals import refuse_scaler
from swd_fused.distributed.sharding import ShardedOver, Sharding, is_distributed
from swd_fused.observer import Observer
from swd_fused.options import Options

GRAD = attrgetter("grad")

# Wrappers that show the optimizer one group at a time show each group again in the next step.
SNAPSHOTS_KEPT = 8


class Seams(NamedTuple):
    """Holds the objects that the core knows only by their protocols."""

    choose: Choose
    decay: Decay
    observers: Sequence[Observer]
    judge: Callable[[Step], Gate]  # returns a gate that may skip or clip a step; called if `Options.outliers` is set


class Stepper:
    """Takes the steps of one optimizer. Whatever it keeps from step to step follows from the groups and the state.

    It holds no reference to the optimizer, which could not be freed at once otherwise.
    """

    def __init__(self, options: Options, sharded_over: ShardedOver | None, seams: Seams) -> None:
        self.options_of_tensors = options.of_tensors()
        self._pass_one = PassOne()
        self._step_before = StepBefore(self._pass_one)
        self.in_parts = FromCallerInParts()
        self.seams = seams
        self.sharded_over = sharded_over
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        # Captured steps, and the pinned memory that they copy from: graphs may be replayed even after other state was
        # loaded.
        self._in_graphs: list[Snapshot | list[Tensor]] = []
        self.set_options(options)
        self.restart(None, (), is_fresh=True)

    def set_options(self, options: Options) -> None:
        """Sets the options that hold from the next step on."""
        self.options = options
        if self.options_of_tensors != options.of_tensors():
            self.options_of_tensors = options.of_tensors()
        self._step_before.forget()  # the sums that it left would be out of date when a step needs them again
        self.source: Source = self._step_before if options.needs_one_pass else self._pass_one
        self.values: GroupValues | None = None

    def restart(self, last: Tensor | None, entries: Groups, is_fresh: bool) -> None:
        """Forgets the steps so far, after other state was loaded or copied. `last` has the last step's results, if any.

        `entries` are the defaults and the groups; `is_fresh` says that training begins here.
        """
        self.forget()
        self.last = torch.full((3,), math.nan, device="cpu") if last is None else last
        self.last_of_graphs: Tensor | None = None  # graphs captured so far step the state before
        self.steps_taken = 0
        for observer in self.seams.observers:
            observer.restart(entries, is_fresh)

    def forget(self) -> None:
        """Drops everything that is kept beside the state."""
        self.values = None
        self.concerned: list[Observer] = []  # the observers whose `concerns` holds for the present groups
        self._kept: list[Snapshot] = []
        self.latest: Snapshot | None = None  # the first of `_kept`, used by the last step
        self._step_before.forget()
        self.in_parts.forget()

    # --- Before a step

    def source_for(self, call: StepCall, groups: Groups, state: State) -> Source:
        """Returns the source of the sums for a call that passes a sum, or for the first call after one that did. All
        ranks choose the same source."""
        if call.grad_sumsq is None or call.numel is None:
            self.in_parts.forget()
        if call.grad_sumsq is None:
            return self.source
        device = next((param.device for group in groups for param in group["params"]), torch.device("cpu"))
        grad_sq = call.checked_grad_sq(groups, self.options, device)
        if call.numel is None:
            return FromCaller(grad_sq)
        return self.in_parts.take_up(grad_sq, call.numel, groups, state, self.sharded_over)

    def new_values(self, groups: Groups) -> GroupValues:
        """Returns the groups as numbers, read anew."""
        self.values = GroupValues(groups, self.options.decay, self.seams.decay)
        self.concerned = [observer for observer in self.seams.observers if observer.concerns(groups, self.options)]
        counts = (observer.needs_all_steps for observer in self.concerned)
        self.counts_steps = bool(self.values.related) or any(counts)
        return self.values

    def let_speak(self, groups: Groups) -> GroupValues:
        """Lets observers warn or change groups. Returns the groups as numbers, read anew."""
        for observer in self.concerned:
            if observer.is_due:
                observer.speak(groups)
        return self.new_values(groups)

    def snapshot(self, inputs: Inputs) -> Snapshot:
        """Returns a snapshot of these tensors: one that still holds, or a new one.

        Tensors that cannot be stepped are refused here, for all buckets, before anything is written.
        """
        last = self.latest
        snapshot = next((kept for kept in self._kept if kept.holds(inputs)), None)
        is_new = snapshot is None
        if snapshot is None:
            if graphs.is_capturing_on({param.device for param in inputs.params}):
                raise graphs.first_in_capture("of some parameters, or the first with other state,", "that state")
            snapshot = Snapshot(inputs, self.seams.choose)
        if snapshot is last:
            return snapshot
        if last is not None and last.left_is_stale(inputs):
            self._step_before.forget()
        if is_new:
            snapshot.commit(inputs.state)
            if last is not None:
                snapshot.take_over(last)
        others = [kept for kept in self._kept if kept is not snapshot and not kept.shares_params_with(inputs.params)]
        self._kept = [snapshot, *others][:SNAPSHOTS_KEPT]
        self.latest = snapshot
        return snapshot

    # --- After a step

    def count_skipped(self, skip: Tensor) -> None:
        """Counts a step if it was skipped. Adds in place, so that a CUDA graph counts in each replay."""
        if self.skipped_steps.device != skip.device:
            move = from_host if self.skipped_steps.is_cpu else to_device
            self.skipped_steps = move(self.skipped_steps, skip.device)
        self.skipped_steps.add_(skip.to(torch.int64))

    def refuse_capture(self, step: Step) -> None:
        """Raises if each replay of a captured step would reset the count of skipped steps."""
        if step.gate.may_skip and self.skipped_steps.device != step.ranks.device:
            raise graphs.first_in_capture("that may be skipped", "skipped_steps")

    def leave_last_to_graphs(self, results: Tensor) -> None:
        """Keeps the last results in memory that graphs write to as well.

        The host is not told of replays, so it must read the results where a replay writes them. All graphs, and all
        steps between them, share the memory of the first capture.
        """
        if self.last_of_graphs is None:
            self.last_of_graphs = results
        else:
            self.last_of_graphs.copy_(results)
        self.last = self.last_of_graphs

    def keep_for_graphs(self, referred_to: Snapshot | list[Tensor]) -> None:
        """Keeps the memory that a captured step refers to."""
        self._in_graphs.append(referred_to)
        if isinstance(referred_to, Snapshot) and self.latest is not None:
            self.latest.note_versions()  # torch has counted the writes, but only the copies have noted them


class Step:
    """Takes one step of some groups. `update` is called once or, during a backward pass, many times.

    The first update finds the schedule's mean, and the others use it. `is_partial` says that more gradients are to
    come.
    """

    buckets: list[Bucket]  # set by the first update, as `ranks`
    ranks: Collective
    results: Tensor  # set by `end`: the mean, the norm before clipping, and 1 if the step was skipped, else 0
    skip: Tensor | None = None  # not 0 if the step changes nothing; None if it could not be skipped
    mean: Tensor | None = None
    grad_factor: Tensor | None = None
    grad_sqs: dict[Sharding, Tensor]  # sums of squared gradients, if pass 2 computes them
    is_partial = False
    interrupts: DeferredInterrupts | None = None  # from the first write; to be delivered after the end
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
        self.values, self._stepper, self._state = values, stepper, state

    @property
    def number(self) -> int:
        """The number of steps taken since training or a resumed run began, this one included."""
        return self._stepper.steps_taken

    @property
    def is_continued(self) -> bool:
        """Whether this call continues a step that another call has begun."""
        return self.source.continues

    def update(self, params: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Steps the parameters that have a gradient. Raises only before anything is written.

        Returns False, having written nothing, if the mean needs all gradients and more are to come.
        """
        stepper = self._stepper
        has_grads = any(map(is_not, grads, repeat(None)))
        if not has_grads and not is_distributed():
            return True
        options, over = stepper.options_of_tensors, stepper.sharded_over
        inputs = Inputs(options, over, self.groups, self.values.kinds, self._state, params, grads)
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
            snapshot.begin(self.values)
            self.buckets, self.ranks = snapshot.buckets, snapshot.ranks
            if self.mean is None and self.is_partial and not self.source.is_known(snapshot):
                return False
            bucket = snapshot.only_bucket
            is_judged = stepper.options.outliers is not None  # by device operations between the passes
            if bucket is not None and self.mean is None and not (self.is_partial or is_judged):
                # Ctrl-C is deferred unless the step is one atomic call after which nothing must be counted.
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
        """Defers Ctrl-C until `deliver_interrupts`, which is called once the step has ended."""
        if self.interrupts is None:
            self.interrupts = DeferredInterrupts()

    def deliver_interrupts(self) -> None:
        """Calls the handler of a deferred interrupt, if there was one."""
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
        """Runs both passes in one call, if the bucket's backend offers that for this source. Returns the results."""
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
        for bucket in snapshot.buckets:  # only the captured copies need the gradients
            bucket.grads = []
        self._is_captured = True
        return captured

    def end(self) -> None:
        """Keeps what the next step needs, and notifies observers. Does nothing if no parameter had a gradient."""
        snapshot, stepper, gate = self._snapshot, self._stepper, self.gate
        if snapshot is None:
            return
        results = self._at_once
        if results is None:
            assert self.mean is not None
            norm = self.source.grad_norm(self) if self._grad_sq is None else gate.grad_norm(self._grad_sq)
            results = torch.stack([self.mean, norm, torch.zeros_like(norm) if self.skip is None else self.skip])
            self.source.leave(self)
        elif gate.may_skip:
            self.skip = results[2]
        self.results = stepper.last = results
        if self._is_captured or stepper.last_of_graphs is not None:
            stepper.leave_last_to_graphs(results)
        stepper.steps_taken += 1
        if self.values.related:
            self.values.count_lrs(self.groups)
        if self.skip is not None and not self.source.continues:
            stepper.count_skipped(self.skip)
        for bucket in snapshot.buckets:
            if bucket.follows_params or not bucket.has_stepped:
                bucket.note_step(gate.may_skip)
        if self._is_captured:
            stepper.keep_for_graphs(snapshot)
        if stepper.concerned:
            has_values = results.is_cpu and type(results) is Tensor  # and is neither fake nor to be waited for
            mean = results.tolist()[0] if has_values else math.nan
            is_harmless = mean >= self.values.harmless_mean
            for observer in stepper.concerned:
                if not (is_harmless and observer.needs_small_mean):
                    observer.note(self)


def take(stepper: Stepper, groups: Groups, state: State, grads: list[Tensor | None] | None, call: StepCall) -> None:
    """Takes a step of all groups with these gradients, or with the parameters' own if `grads` is None."""
    if torch.is_inference_mode_enabled():  # state made in inference mode could not be written to outside of it
        with torch.inference_mode(False), torch.no_grad():
            return take(stepper, groups, state, grads, call)
    skips_nonfinite = stepper.options.skip_nonfinite
    may_skip = call.found_inf is not None or skips_nonfinite
    gate = Gate(stepper.options.max_grad_norm, call.grad_scale, call.found_inf, skips_nonfinite, may_skip)
    step = Step(stepper, groups, state, stepper.source, gate)
    params = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(PARAMS, groups)))
    if grads is None:
        grads = list(map(GRAD, params))
    if call.grad_sumsq is not None or stepper.in_parts.is_begun:
        step.source = stepper.source_for(call, groups, state)
    if stepper.options.outliers is not None:
        step.gate = stepper.seams.judge(step)
    try:
        step.update(params, grads)
        step.end()
    finally:
        if step.interrupts is not None:
            step.deliver_interrupts()
    return None
