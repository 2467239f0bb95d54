"""Gradient release: parameters are stepped during the backward pass, as soon as their gradients are complete."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from swd_fused.distributed.sharding import Sharding, local_tensor
from swd_fused.distributed.wrappers import refuse_late_reduction
from swd_fused.options import Options
from swd_fused.schedule import Gate, StepScalars
from swd_fused.state.moments import has_moments
from swd_fused.step.hooks import GradientHook, StepCall
from swd_fused.step.interrupts import deferred_interrupts
from swd_fused.step.stepper import Groups, Stepper
from swd_fused.tensors.description import Description, State, StepInput
from swd_fused.tensors.hyper import GroupValues, scalar_dtype
from swd_fused.tensors.ranks import sharding_in
from swd_fused.tensors.transfer import to_device

# Small gradients wait until so many bytes can be stepped together, counted as each rank's even share of a parameter.
# The host looks through all tensors of the model for each update, however few it is of, so a thousand small layers must
# not be a thousand updates; and what is kept waiting is little beside the largest layer's gradient.
GATHERED_BYTES = 4 << 20

# A first step needs all gradients before the first update. It then makes the state of one part of the parameters at a
# time and frees their gradients, so that its peak is not state and all gradients together: for a GPT of 98M parameters
# 13.2 bytes a parameter in place of 16.8. Buckets are made anew for each part: more parts would take longer, once.
FIRST_STEP_PARTS = 16

NO_GATE = Gate()


class ReleasedStep:
    """Holds what was done since the last `optimizer.step()`."""

    def __init__(self, options: Options, keeps_gradients: bool) -> None:
        self.options = options  # other ones make a new step
        self.keeps_gradients = keeps_gradients  # no parameter has taken a step yet, and a first step is exact
        self.mean: Tensor | None = None  # the schedule's, once the first parameter was stepped
        self.grad_sqs: dict[Sharding, Tensor] = {}
        self.stepped: set[int] = set()  # ids of parameters
        self.gathered: dict[int, Tensor] = {}  # by id
        self.gathered_bytes = 0

    def update(self, stepper: Stepper, values: GroupValues, inputs: StepInput) -> Description:
        """Steps what has a gradient there; or finds that no parameter has taken a step yet, and keeps gradients."""
        description = stepper.described(inputs)
        try:
            if stepper.options.uses_sums:
                description.refuse_unknown_shards()
            description.begin(values)
            if self.mean is None:
                if not stepper.step_before.has_stepped(description.buckets, description.ranks):
                    self.keeps_gradients = True
                    return description
                sums = stepper.step_before.sums(description, NO_GATE)
                self.mean = sums.mean(None, stepper.options.total_numel)
            with deferred_interrupts():
                self._update_buckets(description, self.mean)
        finally:
            description.end()
        return description

    def _update_buckets(self, description: Description, mean: Tensor) -> None:
        for bucket in description.buckets:
            if bucket.present_grads:
                grad_sq = bucket.backend.pass2(bucket, to_device(mean, bucket.device), None, None, True)
                grad_sq = to_device(grad_sq, description.ranks.device)
                self.grad_sqs[bucket.sharding] = self.grad_sqs.get(bucket.sharding, 0) + grad_sq
                bucket.note_step(may_have_been_skipped=False)

    def end(self, stepper: Stepper, groups: Groups, description: Description, grad_sq: Tensor | None = None) -> None:
        """Leaves what the next step needs, and keeps what users log."""
        assert self.mean is not None, "known before the first update"
        ranks = description.ranks
        zero = torch.zeros((), dtype=scalar_dtype(ranks.device), device=ranks.device)
        stepper.step_before.leave_released(description, self.grad_sqs)
        if grad_sq is None:
            grad_norm = stepper.step_before.grad_norm([zero, *self.grad_sqs.values()], NO_GATE, ranks)
        else:
            grad_norm = grad_sq.sqrt()
        scalars = StepScalars(self.mean, grad_norm, None)
        stepper.record(description, groups, stepper.begin(groups), scalars, NO_GATE)


class GradientRelease:
    """Steps each parameter of an optimizer in the backward pass and frees its gradient; `remove()` ends that.

    The lagged mean follows from the state before the step, so it is known before the first gradient. Each update takes
    the description of an ordinary step, in which all gradients but a few are absent.
    """

    def __init__(self, stepper: Stepper, groups: Groups) -> None:
        self._stepper = stepper
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._hooks: dict[int, GradientHook] = {}  # by id of the parameter
        self._watched: list[Tensor] = []  # the parameters that these ids belong to
        self._accumulating = 0
        self._knows_wrappers = False
        self._step: ReleasedStep | None = None
        self._order = StreamOrder()
        self._groups = groups
        self.is_removed = False
        check_can_release(stepper.options)
        refuse_late_reduction(params_of(groups))

    @property
    def has_ended(self) -> bool:
        """Whether it was removed, and no step is begun that `optimizer.step()` must end."""
        return self.is_removed and self._step is None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def check_change(self, name: str, value: object, options: Options) -> None:
        """Raises if an option cannot be set to this value now, or ever."""
        if self._step is not None:
            raise RuntimeError(
                f"FusedAdamS got {name}={value!r} after a backward pass that has stepped parameters already, with "
                f"release_gradients() on: {name} holds for whole steps. Call optimizer.step() first."
            )
        check_can_release(options)

    def remove(self) -> None:
        """Ends gradient release. A step that was begun is still ended by `optimizer.step()`."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self.is_removed = True

    def watch(self, groups: Groups, state: State) -> None:
        """Follows the parameters that the optimizer has now: groups are added, and wrappers replace tensors."""
        self._groups, self._state = groups, state
        group_of = {id(param): group for group in groups for param in group["params"]}

        def share(param: Tensor) -> int:
            # Alike on all ranks, so that they step together what may have to be redistributed among them.
            ranks = prod(over.size() for over in sharding_in(group_of[id(param)], param, self._stepper.sharded_over))
            return param.numel() * param.element_size() // ranks

        by_id = {id(param): param for param in params_of(groups) if param.requires_grad}
        for gone in self._hooks.keys() - by_id.keys():
            self._hooks.pop(gone).remove()
        for number in by_id.keys() - self._hooks.keys():
            self._hooks[number] = GradientHook(self, by_id[number], share(by_id[number]))
        self._watched = list(by_id.values())

    @_disable_dynamo
    @torch.no_grad()
    def take(self, param: Tensor, size: int) -> None:
        """Takes up a gradient that is complete. Called by autograd, or by FSDP2 after its reduction."""
        with self._lock:
            if self._accumulating or self.is_removed:
                return
            step = self._begun()
            if step.keeps_gradients:
                return
            if id(param) in step.stepped or id(param) in step.gathered:
                raise RuntimeError(second_gradient(param))
            step.gathered[id(param)] = param
            step.gathered_bytes += size
            if step.gathered_bytes >= GATHERED_BYTES:
                self._release(step, list(step.gathered.values()))

    @_disable_dynamo
    def end_step(self, groups: Groups, state: State, call: StepCall) -> None:
        """Steps what was not released, and ends the step."""
        check_step_of_released(call)
        with torch.inference_mode(False), torch.no_grad():
            self._end_step(groups, state)

    def _end_step(self, groups: Groups, state: State) -> None:
        self._groups, self._state = groups, state
        with self._lock:
            step, params = self._step, params_of(groups)
            if step is not None and step.keeps_gradients and not has_state(state):
                self._take_first_step(step, [param for param in params if param.grad is not None])
            elif step is None or step.mean is None or step.options is not self._stepper.options:
                self._stepper.take(groups, state)
            else:
                rest = [param for param in params if param.grad is not None]
                again = [param for param in rest if id(param) in step.stepped]
                if again:
                    raise RuntimeError(second_gradient(again[0]))
                step.end(self._stepper, groups, self._release(step, rest))
            self._step = None
            if self.is_removed:
                return
            for param in params:
                param.grad = None
            self.watch(groups, state)

    def forget(self) -> None:
        """Drops a step that was begun, after other state was loaded."""
        self._step = None

    def _begun(self) -> ReleasedStep:
        if self._step is None or self._step.options is not self._stepper.options:
            check_can_release(self._stepper.options)
            if not self._knows_wrappers:  # the model may have been wrapped in the meantime
                refuse_late_reduction(params_of(self._groups))
                self._knows_wrappers = True
            self._stepper.begin(self._groups)
            self._step = ReleasedStep(self._stepper.options, keeps_gradients=not has_state(self._state))
        return self._step

    def _release(self, step: ReleasedStep, params: list[Tensor]) -> Description:
        """Steps these parameters and frees their gradients."""
        stepper = self._stepper
        self._order.begin(params)
        values = stepper.begin(self._groups)
        try:
            description = step.update(stepper, values, self._inputs(params, values, self._state))
        finally:
            step.gathered, step.gathered_bytes = {}, 0
        if step.mean is None:
            return description
        self._order.end(params)
        step.stepped |= set(map(id, params))
        for param in params:
            param.grad = None
        return description

    def _take_first_step(self, step: ReleasedStep, params: list[Tensor]) -> None:
        """Takes an exact step of all that has a gradient, and frees gradients as it goes.

        Communicates as an ordinary step does, which other ranks may take.
        """
        stepper, parts = self._stepper, in_parts(params, FIRST_STEP_PARTS)
        ranks = stepper.collective(self._groups)
        values = stepper.begin(self._groups)
        before = stepper.step_before
        if before.has_stepped([], ranks):  # others have
            sums = before.sums_of_others()
        else:
            has_amsgrad = any(group["amsgrad"] for group in self._groups)
            sums = before.first_sums((self._without_state(part, values) for part in parts), ranks, has_amsgrad)
        step.mean = sums.mean(None, stepper.options.total_numel)
        for part in parts or [[]]:
            description = self._release(step, part)
        step.end(stepper, self._groups, description, sums.grad_sq)

    def _without_state(self, params: list[Tensor], values: GroupValues) -> Description:
        """Returns a description of these parameters and their gradients, with moments that are zero and nobody's."""
        description = Description(self._inputs(params, values, {}))
        description.begin(values)
        return description

    def _inputs(self, params: list[Tensor], values: GroupValues, state: State) -> StepInput:
        """Returns the inputs of a step in which only these parameters have gradients."""
        every, ids = params_of(self._groups), set(map(id, params))
        grads = [param.grad if id(param) in ids else None for param in every]
        return self._stepper.inputs(self._groups, values, state, every, grads)


def params_of(groups: Groups) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def has_state(state: State) -> bool:
    return any(isinstance(entry, dict) and has_moments(entry) for entry in state.values())


def in_parts(params: list[Tensor], count: int) -> list[list[Tensor]]:
    """Cuts a list into at most so many lists, of about equally many bytes where no parameter is larger."""
    total, before = sum(param.nbytes for param in params), 0
    parts: dict[int, list[Tensor]] = {}
    for param in params:
        parts.setdefault(before * count // max(1, total), []).append(param)
        before += param.nbytes
    return list(parts.values())


class StreamOrder:
    """Keeps updates in order on GPUs, where FSDP2 and autograd call hooks on streams of their own."""

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Event] = {}

    def begin(self, params: Iterable[Tensor]) -> None:
        """Has the current streams wait for the update before."""
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)
        for param in params:
            if param.grad is not None and param.is_cuda:
                # It is freed while the update is still to run, and may belong to another stream.
                local_tensor(param.grad).record_stream(torch.cuda.current_stream(param.device))

    def end(self, params: Iterable[Tensor]) -> None:
        for device in {param.device for param in params if param.is_cuda}:
            self._last[device] = torch.cuda.current_stream(device).record_event()


# --- What gradient release does not go with


def check_can_release(options: Options) -> None:
    if options.max_grad_norm is not None or options.skip_nonfinite:
        norm = options.max_grad_norm
        got = "skip_nonfinite=True" if norm is None else f"max_grad_norm={norm!r}"
        raise ValueError(
            f"release_gradients does not go with {got}, which needs the norm of all gradients before the first update. "
            "Leave that out, or gradient release, which remove() of what it returned ends."
        )
    if not options.needs_one_pass:
        raise ValueError(
            'release_gradients does not go with schedule="exact", whose mean is not known before all gradients are. '
            'Use schedule="lagged", whose mean is that of the step before; or end gradient release by remove() of what '
            "it returned."
        )


def refuse_step_in_backward() -> NoReturn:
    """Refuses hooks that step each parameter as soon as its gradient is there: each would get its own schedule."""
    raise RuntimeError(
        "FusedAdamS.step() was called within a backward pass, as register_post_accumulate_grad_hook does to free "
        "gradients early. The schedule is a mean over the whole model, which is not known before all gradients "
        'are. Call step() after backward(). To free gradients early use schedule="lagged", whose mean is known '
        "before, and call optimizer.release_gradients() once: it steps parameters in the backward pass, and "
        "step() after backward() ends the step."
    )


def check_step_of_released(call: StepCall) -> None:
    """Refuses what `step` cannot be told after gradients were released."""
    if call.closure is not None:
        raise RuntimeError(
            "FusedAdamS.step() got a closure with release_gradients() on, wanted none: parameters are stepped while it "
            "runs the backward pass. Call backward() first, then step() without it."
        )
    if call.grad_sumsq is not None or call.numel is not None or call.provider is not None:
        raise RuntimeError(
            "FusedAdamS.step() got the gradients' sum of squares with release_gradients() on, after most of them were "
            'stepped and freed. Use one of the two: grad_sumsq, or gradient release with schedule="lagged".'
        )
    if call.scaling != (None, None):
        raise RuntimeError(
            "FusedAdamS.step() was called by a GradScaler with release_gradients() on: the loss scale, and whether to "
            "skip the step, come after most gradients were stepped and freed. Train in bfloat16, which needs no loss "
            "scaling, or without gradient release."
        )


def second_gradient(param: Tensor) -> str:
    return (
        f"A parameter of shape {tuple(param.shape)} got a second gradient before optimizer.step(), but with "
        "release_gradients() on its first gradient is used up. To accumulate gradients over several backward passes "
        "run all but the last within optimizer.accumulate_gradients(). After a backward pass that has failed call "
        "optimizer.zero_grad() and optimizer.step(), which ends the step for the parameters that have taken it."
    )
