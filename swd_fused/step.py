"""A step: the sums from their source, the scalars that follow from them, and pass 2 over all buckets."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from swd_fused import backends, captures
from swd_fused.adamw_terms import InAdamWTerms
from swd_fused.bucket import Bucket, Group
from swd_fused.buckets import Buckets
from swd_fused.decay_warning import DecayWarning
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.ranks import Ranks
from swd_fused.distributed.sharding import ShardedOver
from swd_fused.moments import has_moments
from swd_fused.options import BackendName
from swd_fused.schedule import Gate, StepScalars
from swd_fused.state import initialized
from swd_fused.sums import (
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
from swd_fused.transfer import from_host, is_fake, to_device


class TakesSteps(InAdamWTerms):
    """The part of FusedAdamS that takes a step, and what it keeps from one step to the next."""

    schedule: str
    total_numel: int | None
    backend: BackendName
    grad_sumsq_provider: Callable[[], tuple[float | Tensor, int | None]] | None
    _sharded_over: ShardedOver | None
    _ranks: Ranks
    _buckets: Buckets
    _pass_one: PassOne
    _step_before: StepBefore
    _in_parts: FromCallerInParts
    _decay_warning: DecayWarning
    _last: StepScalars | Tensor
    _in_graphs: list[Bucket]

    @property
    def exp_avg_sq_mean(self) -> Tensor:  # type: ignore[override]
        """The mean of v^ that the last step's schedule used: a zero-dimensional tensor, NaN before the first."""
        return self._last[0]

    @property
    def grad_norm(self) -> Tensor:  # type: ignore[override]
        """The norm of the last step's gradients, unscaled and before clipping: a zero-dimensional tensor."""
        return self._last[1]

    def numbered_params(self) -> list[Tensor]:
        """Returns all parameters, in the order of their groups."""
        return [param for group in self.param_groups for param in group["params"]]

    def collective(self, check: bool = True) -> Collective:
        """Returns the all-reduces over the ranks that share this optimizer's parameters."""
        return self._ranks.collective(self.param_groups, check)

    def _eager_step(self, grad_sumsq: float | Tensor | None, numel: int | None) -> None:
        check_not_in_backward(grad_sumsq)
        if grad_sumsq is None and numel is not None:
            raise ValueError(f"step got numel={numel} without grad_sumsq, wanted both: it says how many have that sum.")
        if grad_sumsq is None and self.grad_sumsq_provider is not None:
            grad_sumsq, numel = self.grad_sumsq_provider()
        self._take_step([param.grad for param in self.numbered_params()], grad_sumsq, numel)

    def _take_step(self, grads: list[Tensor | None], grad_sumsq: float | Tensor | None, numel: int | None) -> None:
        if torch.is_inference_mode_enabled():  # state that is made in inference mode could never be written to outside
            with torch.inference_mode(False), torch.no_grad():
                return self._take_step(grads, grad_sumsq, numel)
        ranks = self.collective(check=grad_sumsq is None)
        gate = Gate(
            self.max_grad_norm,
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            self.options.skip_nonfinite,
        )
        if captures.is_capturing(ranks.device):
            captures.check_step(
                carries_sum=numel is not None,
                is_lagged_over_ranks=grad_sumsq is None and self._needs_one_pass() and not ranks.is_local,
                is_calibrating=any(group["adamw_weight_decay"] is not None for group in self.param_groups),
                is_first_to_skip=gate.may_skip and self.skipped_steps.device != ranks.device,
                is_first_to_clip=gate.max_grad_norm is not None and not self._clipped_steps.is_ready_on(ranks.device),
            )
        self._end_calibration()
        self._decay_warning.warn()
        if ranks.is_local and not any(map(is_not, grads, repeat(None))):
            return None
        grad_sq = None
        if grad_sumsq is not None:
            grad_sq = checked_grad_sq(grad_sumsq, numel, self.param_groups, self.schedule, ranks.device)
        buckets = self._buckets.begin(self.param_groups, self.state, grads)
        try:
            source = self._source(buckets, grads, grad_sq, numel)
            scalars: StepScalars | Tensor | None = self._fused_step(buckets, source, gate, ranks)
            if scalars is None:
                scalars = self._step_in_passes(buckets, source, gate, ranks)
        finally:
            self._buckets.end()
        self._record(scalars, gate)
        return None

    def _source(
        self, buckets: list[Bucket], grads: list[Tensor | None], grad_sq: Tensor | None, numel: int | None
    ) -> Source:
        """Returns where this step's sums come from. All ranks come to the same answer."""
        if self._buckets.were_changed:
            self._step_before.forget()
        if grad_sq is None or numel is None:
            self._in_parts.forget()
            if grad_sq is not None:
                return FromCaller(grad_sq)
            return self._step_before if self._needs_one_pass() else self._pass_one
        if any(bucket.is_stepped_by_graphs() for bucket in buckets):
            raise RuntimeError(
                "FusedAdamS got step(grad_sumsq=, numel=) after steps of a CUDA graph, which the carried sum of the "
                "whole model would leave out. Leave out numel, and step all parameters at once."
            )
        params = [param for param, grad in zip(self.numbered_params(), grads, strict=True) if grad is not None]
        beta2, bias_correction = float(self.param_groups[0]["betas"][1]), self.param_groups[0]["bias_correction"]
        self._in_parts.begin(grad_sq, numel, beta2, bias_correction, params, self._stored_sum)
        return self._in_parts

    def _fused_step(self, buckets: list[Bucket], source: Source, gate: Gate, ranks: Collective) -> Tensor | None:
        """Takes both passes as one call, where there is a single local bucket and its backend offers that.

        Returns StepScalars as one tensor: taking it apart takes longer than a small step needs for its sums.
        """
        is_single_local_bucket = len(buckets) == 1 and ranks.is_local and self.total_numel is None
        if not is_single_local_bucket:
            return None
        bucket, lagged = buckets[0], source is self._step_before
        if lagged and not bucket.is_known_to_have_stepped():
            if bucket.device.type != "cpu":
                return None
            lagged = False  # a first step is exact
        elif not lagged and source is not self._pass_one:
            return None
        return bucket.backend.step(bucket, gate.on(bucket.device), lagged)

    def _step_in_passes(self, buckets: list[Bucket], source: Source, gate: Gate, ranks: Collective) -> StepScalars:
        sums = source.sums(buckets, gate, ranks)
        grad_factor = gate.grad_factor(sums.grad_sq, ranks.device)
        mean = sums.mean(grad_factor, self.total_numel)
        skip = skip_on_all_ranks(gate, sums.grad_sq, ranks)
        grad_sqs = [
            bucket.backend.pass2(
                bucket,
                to_device(mean, bucket.device),
                on_device_of(bucket, grad_factor),
                on_device_of(bucket, skip),
                source is self._step_before,
            )
            for bucket in buckets
        ]
        source.leave(buckets, grad_sqs, gate, skip, ranks)
        if sums.grad_sq is None:
            return StepScalars(mean, self._step_before.grad_norm(grad_sqs, gate, ranks), skip)
        return StepScalars(mean, gate.grad_norm(sums.grad_sq), skip)

    def _record(self, scalars: StepScalars | Tensor, gate: Gate) -> None:
        """Keeps what users log, and what the next step wants to know."""
        self._last = scalars
        if gate.may_skip and not self._in_parts.goes_on:
            skip = scalars[2]
            assert skip is not None, "whoever may skip says whether it did"
            if self.skipped_steps.device != skip.device:
                self.skipped_steps = (from_host if self.skipped_steps.is_cpu else to_device)(
                    self.skipped_steps, skip.device
                )
            self.skipped_steps.add_(skip.to(torch.int64))  # in place: a CUDA graph does so in each replay
        if gate.max_grad_norm is not None and not self._in_parts.goes_on:
            self._clipped_steps.count(scalars, gate.max_grad_norm, gate.may_skip)
        for bucket in self._buckets.current:
            bucket.note_step(gate.may_skip)
        if self._buckets.are_captured:
            self._in_graphs += self._buckets.current
        if self.options.decay == "scheduled":
            if not self._in_parts.goes_on:
                self._count_calibration_step()
            self._decay_warning.note(scalars[0], self.param_groups, self._buckets.rows)

    def _needs_one_pass(self) -> bool:
        """Tells whether nothing of this step's gradients must be known before the update."""
        if self.options.decay == "scheduled":
            return self.schedule == "lagged"
        return self.max_grad_norm is None and not self.options.skip_nonfinite

    def _has_amsgrad(self) -> bool:
        return any(group["amsgrad"] for group in self.param_groups)

    def _stored_sum(self) -> tuple[Tensor, Tensor]:
        """Returns the sum of v and the steps taken over all state, since wrappers show one group at a time."""
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        params = [
            (param, group_of.get(param, {}))
            for param, state in self.state.items()
            if isinstance(param, Tensor) and has_moments(state)
        ]
        states = [(self._ranks.sharding_of(param, group), self.state[param]) for param, group in params]
        return stored_sum(states, self._ranks.collective_of(params))

    # --- What is kept from step to step

    def _forget(self) -> None:
        """Resets the logged mean and norm to NaN, and everything that is kept beside the state."""
        self._start_anew()
        self._last = torch.full((3,), math.nan, device="cpu")

    def _start_anew(self) -> None:
        """Drops everything that is kept from step to step beside the state."""
        self._ranks = Ranks(self._sharded_over)
        self._buckets = self._new_buckets()
        self._step_before.forget()
        self._in_parts = FromCallerInParts()

    def _new_buckets(self) -> Buckets:
        return Buckets(
            self.options, lambda param: self._backend_of(param)[0], self._ranks.sharding_of, self._staged_state
        )

    def _staged_state(self, state: dict[str, Any], param: Tensor, group: Group) -> dict[str, Any]:
        return initialized(dict(state), param, self.options, group, self._backend_of(param)[0])

    def _backend_of(self, param: Tensor) -> tuple[backends.Backend, str]:
        # Where there is no memory nothing is computed, and only plain operations know what comes out.
        name = "torch" if is_fake(param) and not param.is_meta else self.backend
        return backends.choose(name, param.device, param.dtype.to_real())


def check_not_in_backward(grad_sumsq: object) -> None:
    """Refuses hooks that step each parameter as soon as its gradient is there: each would get its own schedule."""
    if grad_sumsq is None and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "FusedAdamS.step() was called within a backward pass, as register_post_accumulate_grad_hook does to free "
            "gradients early. The schedule is a mean over the whole model, which is not known before all gradients "
            'are. Call step() after backward(). To free gradients early use schedule="lagged", whose mean is known '
            "before, and call optimizer.release_gradients() once: it steps parameters in the backward pass, and "
            "step() after backward() ends the step."
        )
