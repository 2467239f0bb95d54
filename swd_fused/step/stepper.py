"""Takes steps: describes the tensors, gets the sums from their source, and updates all buckets with what follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import ShardedOver, is_distributed
from swd_fused.options import Options
from swd_fused.schedule import Gate, StepScalars
from swd_fused.state.moments import has_moments
from swd_fused.step.adamw_terms import Calibration
from swd_fused.step.clipped_steps import ClippedSteps
from swd_fused.step.decay_warning import CALIBRATED_ADVICE, DecayWarning
from swd_fused.step.interrupts import deferred_interrupts
from swd_fused.step.sums import (
    FromCaller,
    FromCallerInParts,
    PassOne,
    Source,
    StepBefore,
    checked_grad_sq,
    on_device_of,
    skip_on_all_ranks,
    stored_sum,
)
from swd_fused.tensors import graphs
from swd_fused.tensors.bucket import Bucket
from swd_fused.tensors.description import Description, State, StepInput
from swd_fused.tensors.hyper import PARAMS, Group, GroupValues
from swd_fused.tensors.ranks import collective_of, sharding_in
from swd_fused.tensors.transfer import from_host, to_device

# Wrappers that show the optimizer one group at a time come back to each of them.
DESCRIPTIONS_KEPT = 8

GRAD = attrgetter("grad")

Groups = Sequence[dict[str, Any]]


class Stepper:
    """Takes the steps of one optimizer. All that it keeps from step to step follows from the groups and the state.

    It knows neither the optimizer, which could not be freed at once otherwise, nor where gradients come from.
    """

    def __init__(self, options: Options, sharded_over: ShardedOver | None, is_fresh: bool) -> None:
        """`is_fresh` is whether training begins here."""
        self._of_tensors: Options | None = None
        self._pass_one = PassOne()
        self.step_before = StepBefore(self._pass_one)
        self.set_options(options)
        self.sharded_over = sharded_over
        self.last: StepScalars | Tensor = torch.full((3,), math.nan, device="cpu")
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self.clipped_steps = ClippedSteps()
        self.decay_warning = DecayWarning(is_fresh=is_fresh)
        self.calibration = Calibration()
        self._values: GroupValues | None = None
        self._kept: list[Description] = []  # the one of the last step comes first
        # Kept for graphs that may be replayed, even after other state was loaded: captured steps, and the pinned
        # memory that they copy from.
        self._in_graphs: list[Description | list[Tensor]] = []
        self._in_parts = FromCallerInParts()

    def set_options(self, options: Options) -> None:
        """Has options obeyed from the next step on."""
        self.options = options
        if self._of_tensors != options.of_tensors():
            self._of_tensors = options.of_tensors()
        self.step_before.forget()  # what it has left is too old when steps that need it come again
        self._usual_source: Source = self.step_before if options.needs_one_pass else self._pass_one

    def restart(self, last: StepScalars | Tensor | None, is_fresh: bool) -> None:
        """Forgets the steps so far, after other state was loaded or copied. `last` is what the last step has left."""
        self.forget()
        self.last = torch.full((3,), math.nan, device="cpu") if last is None else last
        self.decay_warning = DecayWarning(self.decay_warning.advice, is_fresh)

    def forget(self) -> None:
        """Drops everything that is kept beside the state."""
        self.calibration = Calibration()
        self._values, self._kept = None, []
        self.step_before.forget()
        self._in_parts.forget()

    def take(
        self,
        groups: Groups,
        state: State,
        grads: list[Tensor | None] | None = None,
        scaling: tuple[Tensor | None, Tensor | None] = (None, None),
        grad_sumsq: float | Tensor | None = None,
        numel: int | None = None,
    ) -> None:
        """Takes a step with these gradients, or with those that the parameters have.

        `scaling` are the loss scale and whether GradScaler has found an infinity.
        """
        if torch.is_inference_mode_enabled():  # state that is made in inference mode could never be written to outside
            with torch.inference_mode(False), torch.no_grad():
                return self.take(groups, state, grads, scaling, grad_sumsq, numel)
        options, values = self.options, self._values
        if values is None or not values.hold(groups):
            values = self._values = GroupValues(groups, options.decay)
        if values.is_calibrating or values.tensor_lrs or self.decay_warning.is_due:
            values = self.begin(groups)
        params = list(chain.from_iterable(map(PARAMS, groups)))
        if grads is None:
            grads = list(map(GRAD, params))
        has_grads = any(map(is_not, grads, repeat(None)))
        if not has_grads and not is_distributed():
            return None
        grad_sq = None
        if grad_sumsq is not None:
            may_skip = scaling[1] is not None or options.skip_nonfinite
            device = params[0].device if params else torch.device("cpu")
            grad_sq = checked_grad_sq(grad_sumsq, numel, groups, options.schedule, device, may_skip)
        inputs = self.inputs(groups, values, state, params, grads)
        step = self._kept[0] if self._kept else None
        if step is None or not step.holds(inputs):
            step = self.described(inputs)
        is_captured = False
        try:
            if not has_grads and step.ranks.is_local:
                return None
            if step.may_have_unknown_shards and grad_sumsq is None and options.uses_sums:
                step.refuse_unknown_shards()
            gate = Gate(options.max_grad_norm, *scaling, options.skip_nonfinite)
            is_captured = bool(step.gpus) and graphs.is_capturing_on(step.gpus)
            if is_captured:
                step = self._captured(step, groups, gate, grad_sumsq is not None, numel is not None)
            step.begin(values)
            source = self._usual_source
            if grad_sq is not None or self._in_parts.is_begun:
                source = self._source(step, groups, state, grad_sq, numel)
            bucket = step.only_bucket
            scalars: StepScalars | Tensor | None = None
            if bucket is not None and bucket.backend.is_atomic:
                scalars = self._step_at_once(bucket, source, gate)
            if scalars is None:
                with deferred_interrupts():
                    scalars = self._step_in_passes(step, source, gate)
        finally:
            step.end()
            if is_captured:
                self._in_graphs.append(graphs.kept())
        self.record(step, groups, values, scalars, gate)
        return None

    def inputs(
        self, groups: Groups, values: GroupValues, state: State, params: list[Tensor], grads: list[Tensor | None]
    ) -> StepInput:
        """Returns what a description is made of."""
        assert self._of_tensors is not None, "set with the options"
        return StepInput(self._of_tensors, self.sharded_over, groups, values.kinds, state, params, grads)

    def begin(self, groups: Groups) -> GroupValues:
        """Returns the hyper-parameters of a step, after saying what the steps before have shown."""
        values = self._values
        if values is None or not values.hold(groups):
            values = self._values = GroupValues(groups, self.options.decay)
        if values.is_calibrating and self.end_calibration(groups):
            values = self._values = GroupValues(groups, self.options.decay)
        values.check_tensor_lrs(groups)
        if self.decay_warning.is_due:
            self.decay_warning.warn()
        return values

    def end_calibration(self, groups: Groups) -> bool:
        """Lets the schedule take over where calibration has ended. Returns whether a group has changed."""
        has_changed = self.calibration.end(groups, self.last[0], self.skipped_steps)
        if has_changed:
            self.decay_warning.advice = CALIBRATED_ADVICE
        return has_changed

    def described(self, inputs: StepInput) -> Description:
        """Returns a description of these tensors: one that still holds, or a new one.

        Everything that can be refused is refused here, for all buckets, before anything is written.
        """
        last = self._kept[0] if self._kept else None
        step = next((kept for kept in self._kept if kept.holds(inputs)), None)
        is_new = step is None
        if step is None:
            graphs.check_prepared({param.device for param in inputs.params})
            step = Description(inputs)
        if step is last:
            return step
        if last is not None and last.left_is_stale(inputs):
            self.step_before.forget()
        if is_new:
            step.commit(inputs.state, self._kept)
            if last is not None:
                step.take_over(last)
        others = [kept for kept in self._kept if kept is not step and not kept.shares_params_with(inputs.params)]
        self._kept = [step, *others][:DESCRIPTIONS_KEPT]
        return step

    def collective(self, groups: Groups) -> Collective:
        """Returns the all-reduces over the ranks that share these groups' parameters."""
        return collective_of([(param, group) for group in groups for param in group["params"]], self.sharded_over)

    def record(
        self, step: Description, groups: Groups, values: GroupValues, scalars: StepScalars | Tensor, gate: Gate
    ) -> None:
        """Keeps what users log, and what the next step wants to know."""
        self.last = scalars
        if values.follows_lrs:
            values.count_lrs(groups)
        may_skip = gate.found_inf is not None or gate.skip_nonfinite
        if may_skip and not self._in_parts.is_same_step:
            skip = scalars[2]
            assert skip is not None, "whoever may skip says whether it did"
            if self.skipped_steps.device != skip.device:
                self.skipped_steps = (from_host if self.skipped_steps.is_cpu else to_device)(
                    self.skipped_steps, skip.device
                )
            self.skipped_steps.add_(skip.to(torch.int64))  # in place: a CUDA graph does so in each replay
        if gate.max_grad_norm is not None and not self._in_parts.is_same_step:
            self.clipped_steps.count(scalars, gate.max_grad_norm, may_skip)
        for bucket in step.buckets:
            if bucket.follows_params or not bucket.has_stepped:
                bucket.note_step(may_skip)
        if step.are_captured:
            self._in_graphs.append(step)
            self._kept[0].note_versions()  # the writes are counted, and known only to the copies
        if self.options.decay != "scheduled":
            return
        if values.is_calibrating and not self._in_parts.is_same_step:
            self.calibration.count(groups, scalars[2] if may_skip else None, self.skipped_steps)
        warning = self.decay_warning
        if warning.is_done:
            return
        if type(scalars) is Tensor and scalars.is_cpu and scalars.tolist()[0] >= values.harmless_mean:
            warning.early_steps_left -= 1
        else:
            warning.note(scalars[0], groups)

    def _source(
        self, step: Description, groups: Groups, state: State, grad_sq: Tensor | None, numel: int | None
    ) -> Source:
        """Returns where this step's sums come from. All ranks come to the same answer."""
        if grad_sq is None or numel is None:
            self._in_parts.forget()
            if grad_sq is not None:
                return FromCaller(grad_sq)
            return self._usual_source
        if any(bucket.is_stepped_by_graphs() for bucket in step.buckets):
            raise RuntimeError(
                "FusedAdamS got step(grad_sumsq=, numel=) after steps of a CUDA graph, which the carried sum of the "
                "whole model would leave out. Leave out numel, and step all parameters at once."
            )
        beta2, bias_correction = float(groups[0]["betas"][1]), groups[0]["bias_correction"]
        self._in_parts.begin(
            grad_sq, numel, beta2, bias_correction, step.params_with_grad(), lambda: self._stored_sum(groups, state)
        )
        return self._in_parts

    def _step_at_once(self, bucket: Bucket, source: Source, gate: Gate) -> Tensor | None:
        """Takes both passes as one call, where there is a single local bucket and its backend offers that.

        Returns StepScalars as one tensor: taking it apart takes longer than a small step needs for its sums.
        """
        lagged = source is self.step_before
        if lagged and not (bucket.has_stepped or bucket.find_whether_stepped()):
            if bucket.device.type != "cpu":
                return None
            lagged = False  # a first step is exact
        elif not lagged and source is not self._pass_one:
            return None
        if gate.grad_scale is not None or gate.found_inf is not None:
            gate = gate.on(bucket.device)
        return bucket.backend.step(bucket, gate, lagged)

    def _step_in_passes(self, step: Description, source: Source, gate: Gate) -> StepScalars | Tensor:
        if step.only_bucket is not None and not step.only_bucket.backend.is_atomic:
            scalars = self._step_at_once(step.only_bucket, source, gate)
            if scalars is not None:
                return scalars
        ranks = step.ranks
        sums = source.sums(step, gate)
        grad_factor = gate.grad_factor(sums.grad_sq, ranks.device)
        mean = sums.mean(grad_factor, self.options.total_numel)
        skip = skip_on_all_ranks(gate, sums.grad_sq, ranks)
        grad_sqs = [
            bucket.backend.pass2(
                bucket,
                to_device(mean, bucket.device),
                on_device_of(bucket, grad_factor),
                on_device_of(bucket, skip),
                source is self.step_before,
            )
            for bucket in step.buckets
        ]
        source.leave(step, grad_sqs, gate, skip)
        if sums.grad_sq is None:
            return StepScalars(mean, self.step_before.grad_norm(grad_sqs, gate, ranks), skip)
        return StepScalars(mean, gate.grad_norm(sums.grad_sq), skip)

    def _captured(
        self, step: Description, groups: Sequence[Group], gate: Gate, gives_sum: bool, carries_sum: bool
    ) -> Description:
        """Returns the description for a step that is captured in a CUDA graph, after checking that it can be."""
        graphs.check_step(
            carries_sum=carries_sum,
            is_lagged_over_ranks=not gives_sum and self.options.needs_one_pass and not step.ranks.is_local,
            is_calibrating=any(group["adamw_weight_decay"] is not None for group in groups),
            is_first_to_skip=gate.may_skip and self.skipped_steps.device != step.ranks.device,
            is_first_to_clip=gate.max_grad_norm is not None and not self.clipped_steps.is_ready_on(step.ranks.device),
        )
        captured = step.for_capture()
        for bucket in step.buckets:  # only the copies need the gradients
            bucket.grads = []
        return captured

    def _stored_sum(self, groups: Groups, state: Mapping[Tensor, dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Returns the sum of v and the steps taken over all state, since wrappers show one group at a time."""
        group_of = {param: group for group in groups for param in group["params"]}
        params = [
            (param, group_of.get(param, {}))
            for param, entry in state.items()
            if isinstance(param, Tensor) and has_moments(entry)
        ]
        states = [(sharding_in(group, param, self.sharded_over), state[param]) for param, group in params]
        return stored_sum(states, collective_of(params, self.sharded_over))
