"""Everything kept from step to step: snapshots of tensors, groups as numbers, the last results, the observers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from swd_fused.core.schedule import Gate, StepScalars
from swd_fused.core.snapshot import Choose, Inputs, Snapshot, State
from swd_fused.core.sources import FromCaller, FromCallerInParts, PassOne, Source, StepBefore, StepCall
from swd_fused.core.step import Step
from swd_fused.core.values import Decay, Groups, GroupValues
from swd_fused.devices import graphs
from swd_fused.devices.transfer import from_host, to_device
from swd_fused.distributed.sharding import ShardedOver
from swd_fused.observer import Observer
from swd_fused.options import Options

# Wrappers that show the optimizer one group at a time come back to each of them.
SNAPSHOTS_KEPT = 8


class Judge(Protocol):
    """Decides about steps by what it knows of those before."""

    def gate(self, step: Step) -> Gate:
        """Returns the gate of a step that depends on steps before."""


class Seams(NamedTuple):
    """Holds what the core knows by its protocol only."""

    choose: Choose
    decay: Decay
    observers: Sequence[Observer]
    judge: Judge  # asked if `Options.outliers` is set


class Stepper:
    """Takes the steps of one optimizer. All that it keeps from step to step follows from the groups and the state.

    It knows neither the optimizer, which could not be freed at once otherwise, nor where gradients come from.
    """

    def __init__(self, options: Options, sharded_over: ShardedOver | None, seams: Seams) -> None:
        self.options_of_tensors = options.of_tensors()
        self._pass_one = PassOne()
        self._step_before = StepBefore(self._pass_one)
        self.in_parts = FromCallerInParts()
        self.seams = seams
        self.sharded_over = sharded_over
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        # Kept for graphs that may be replayed, even after other state was loaded: captured steps, and the pinned
        # memory that they copy from.
        self._in_graphs: list[Snapshot | list[Tensor]] = []
        self.set_options(options)
        self.restart(None, (), is_fresh=True)

    def set_options(self, options: Options) -> None:
        """Obeys these options from the next step on."""
        self.options = options
        if self.options_of_tensors != options.of_tensors():
            self.options_of_tensors = options.of_tensors()
        self._step_before.forget()  # what it has left is too old when steps that need it come again
        self.source: Source = self._step_before if options.needs_one_pass else self._pass_one
        self.values: GroupValues | None = None

    def restart(self, last: StepScalars | Tensor | None, entries: Groups, is_fresh: bool) -> None:
        """Forgets the steps so far, after other state was loaded or copied. `last` is what the last step has left.

        `entries` are the defaults and the groups; `is_fresh` says that training begins here.
        """
        self.forget()
        self.last: StepScalars | Tensor = torch.full((3,), math.nan, device="cpu") if last is None else last
        self.last_of_graphs: Tensor | None = None  # graphs go on with the state before
        self.steps_taken = 0
        for observer in self.seams.observers:
            observer.restart(entries, is_fresh)

    def forget(self) -> None:
        """Drops everything that is kept beside the state."""
        self.values = None
        self.concerned: list[Observer] = []  # the observers that are concerned by the present groups
        self._kept: list[Snapshot] = []
        self.latest: Snapshot | None = None  # the first of these, which is of the last step
        self._step_before.forget()
        self.in_parts.forget()

    # --- What a step asks for

    def source_for(self, call: StepCall, groups: Groups, state: State) -> Source:
        """Returns the source of the sums for a call that knows them, or the first one after such calls. All ranks come
        to the same one."""
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
        counts = (not observer.needs_small_mean for observer in self.concerned)
        self.counts_steps = bool(self.values.followed) or any(counts)
        return self.values

    def let_speak(self, groups: Groups) -> GroupValues:
        """Returns the groups as numbers after observers have warned of them or changed them."""
        for observer in self.concerned:
            if observer.is_due:
                observer.speak(groups)
        return self.new_values(groups)

    def snapshot(self, inputs: Inputs) -> Snapshot:
        """Returns a snapshot of these tensors: one that still holds, or a new one.

        Everything that can be refused is refused here, for all buckets, before anything is written.
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

    # --- What a step leaves

    def count_skipped(self, skip: Tensor) -> None:
        """Counts a step if it was skipped. In place: a CUDA graph does so in each replay."""
        if self.skipped_steps.device != skip.device:
            move = from_host if self.skipped_steps.is_cpu else to_device
            self.skipped_steps = move(self.skipped_steps, skip.device)
        self.skipped_steps.add_(skip.to(torch.int64))

    def refuse_capture(self, step: Step) -> None:
        """Raises if a step cannot be captured in a CUDA graph because it would set a count back in each replay."""
        if step.gate.may_skip and self.skipped_steps.device != step.ranks.device:
            raise graphs.first_in_capture("that may be skipped", "skipped_steps")

    def leave_last_to_graphs(self, results: StepScalars | Tensor) -> None:
        """Keeps the last results in memory that graphs write as well.

        The host is not told of replays, so what it reads after one must be where the replay writes. All graphs and all
        steps between them share the memory of the first capture.
        """
        logged = results[:2] if isinstance(results, Tensor) else torch.stack(results[:2])
        if self.last_of_graphs is None:
            self.last_of_graphs = logged
        else:
            self.last_of_graphs.copy_(logged)
        self.last = self.last_of_graphs

    def keep_for_graphs(self, referred_to: Snapshot | list[Tensor]) -> None:
        """Keeps what a captured step refers to."""
        self._in_graphs.append(referred_to)
        if isinstance(referred_to, Snapshot) and self.latest is not None:
            self.latest.note_versions()  # the writes are counted, and known only to the copies
