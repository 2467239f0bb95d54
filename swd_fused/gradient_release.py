"""Gradient release: parameters are stepped during the backward pass, as soon as their gradients are complete."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from swd_fused.distributed.sharding import Sharding, local_tensor
from swd_fused.distributed.wrappers import refuse_late_reduction
from swd_fused.moments import has_moments
from swd_fused.options import Options
from swd_fused.schedule import Gate, StepScalars, scalar_dtype
from swd_fused.transfer import to_device

if TYPE_CHECKING:
    from swd_fused.bucket import Bucket
    from swd_fused.buckets import Buckets
    from swd_fused.optimizer import FusedAdamS

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

    def __init__(self, buckets: Buckets, keeps_gradients: bool) -> None:
        self.buckets = buckets  # load_state_dict makes new ones, and with them a new step
        self.keeps_gradients = keeps_gradients  # no parameter has taken a step yet, and a first step is exact
        self.mean: Tensor | None = None  # the schedule's, once the first parameter was stepped
        self.grad_sqs: dict[Sharding, Tensor] = {}
        self.stepped: set[int] = set()  # ids of parameters
        self.gathered: dict[int, Tensor] = {}  # by id
        self.gathered_bytes = 0


class GradientRelease:
    """Steps each parameter of an optimizer in the backward pass and frees its gradient; `remove()` ends that.

    The lagged mean follows from the state before the step, so it is known before the first gradient. Each update takes
    the same buckets as an ordinary step, in which all gradients but a few are absent.
    """

    def __init__(self, optimizer: FusedAdamS) -> None:
        self._reference = weakref.ref(optimizer)  # which holds this: a cycle would wait for the garbage collector
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._hooks: dict[int, ReleaseHook] = {}  # by id of the parameter
        self._watched: list[Tensor] = []  # the parameters that these ids belong to
        self._is_removed = False
        self._accumulating = 0
        self._knows_wrappers = False
        self._step: ReleasedStep | None = None
        self._order = StreamOrder()
        self._check()
        refuse_late_reduction(optimizer.numbered_params())
        self._watch()

    @property
    def _optimizer(self) -> FusedAdamS:
        optimizer = self._reference()
        assert optimizer is not None, "it is stepping, or about to"
        return optimizer

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass has begun a step that `optimizer.step()` has still to end."""
        return self._step is not None

    def remove(self) -> None:
        """Ends gradient release. A step that was begun is still ended by `optimizer.step()`."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._is_removed = True
        optimizer = self._reference()
        if self._step is None and optimizer is not None:
            optimizer._gradient_release = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    @_disable_dynamo
    @torch.no_grad()
    def take(self, param: Tensor, size: int) -> None:
        """Takes up a gradient that is complete. Called by autograd, or by FSDP2 after its reduction."""
        with self._lock:
            if self._accumulating or self._is_removed or self._reference() is None:
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
    def end_step(self, closure: object, grad_sumsq: object, numel: object) -> None:
        """Steps what was not released, and ends the step. Called by `optimizer.step()`."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.end_step(closure, grad_sumsq, numel)
        optimizer = self._optimizer
        gives_sum = grad_sumsq is not None or numel is not None or optimizer.grad_sumsq_provider is not None
        scaling = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
        check_step_of_released(closure is not None, gives_sum, any(value is not None for value in scaling))
        with self._lock:
            step, params = self._step, optimizer.numbered_params()
            if step is not None and step.keeps_gradients and not has_state(optimizer):
                self._take_first_step(step, [param for param in params if param.grad is not None])
            elif step is None or step.mean is None or step.buckets is not optimizer._buckets:
                optimizer._take_step([param.grad for param in params], None, None)
            else:
                rest = [param for param in params if param.grad is not None]
                again = [param for param in rest if id(param) in step.stepped]
                if again:
                    raise RuntimeError(second_gradient(again[0]))
                self._release(step, rest)
                self._end(step, step.mean)
            self._step = None
            if self._is_removed:
                optimizer._gradient_release = None
                return None
            for param in params:
                param.grad = None
            self._watch()
        return None

    def _begun(self) -> ReleasedStep:
        optimizer = self._optimizer
        if self._step is None or self._step.buckets is not optimizer._buckets:
            self._check()
            if not self._knows_wrappers:  # the model may have been wrapped in the meantime
                refuse_late_reduction(optimizer.numbered_params())
                self._knows_wrappers = True
            optimizer._end_calibration()
            optimizer._decay_warning.warn()
            optimizer.collective(check=False)  # makes other buckets if process groups were set anew
            self._step = ReleasedStep(optimizer._buckets, keeps_gradients=not has_state(optimizer))
        return self._step

    def _release(self, step: ReleasedStep, params: list[Tensor]) -> None:
        """Steps these parameters and frees their gradients."""
        optimizer = self._optimizer
        ids = set(map(id, params))
        grads = [param.grad if id(param) in ids else None for param in optimizer.numbered_params()]
        ranks = optimizer.collective()
        self._order.begin(params)
        buckets = optimizer._buckets.begin(optimizer.param_groups, optimizer.state, grads)
        try:
            if step.mean is None:
                if optimizer._buckets.were_changed:
                    optimizer._step_before.forget()
                if not optimizer._step_before.has_stepped(buckets, ranks):
                    step.keeps_gradients = True
                    return
                sums = optimizer._step_before.sums(buckets, NO_GATE, ranks)
                step.mean = sums.mean(None, optimizer.total_numel)
            for bucket in buckets:
                if bucket.present_grads:
                    mean = to_device(step.mean, bucket.device)
                    grad_sq = to_device(bucket.backend.pass2(bucket, mean, None, None, True), ranks.device)
                    step.grad_sqs[bucket.sharding] = step.grad_sqs.get(bucket.sharding, 0) + grad_sq
                    bucket.note_step(may_have_been_skipped=False)
        finally:
            optimizer._buckets.end()
            step.gathered, step.gathered_bytes = {}, 0
        self._order.end(params)
        step.stepped |= ids
        for param in params:
            param.grad = None

    def _take_first_step(self, step: ReleasedStep, params: list[Tensor]) -> None:
        """Takes an exact step of all that has a gradient, and frees gradients as it goes.

        Communicates as an ordinary step does, which other ranks may take.
        """
        optimizer, ranks = self._optimizer, self._optimizer.collective()
        parts = in_parts(params, FIRST_STEP_PARTS)
        if optimizer._step_before.has_stepped([], ranks):  # others have
            sums = optimizer._step_before.sums([], NO_GATE, ranks)
        else:
            sums = optimizer._step_before.first_sums(map(self._buckets_without_state, parts), ranks)
        step.mean = sums.mean(None, optimizer.total_numel)
        for part in parts or [[]]:
            self._release(step, part)
        self._end(step, step.mean, sums.grad_sq)

    def _buckets_without_state(self, params: list[Tensor]) -> list[Bucket]:
        """Returns buckets of these parameters and their gradients, with moments that are zero and belong to nobody."""
        optimizer, ids = self._optimizer, set(map(id, params))
        grads = [param.grad if id(param) in ids else None for param in optimizer.numbered_params()]
        return optimizer._new_buckets().begin(optimizer.param_groups, {}, grads)

    def _end(self, step: ReleasedStep, mean: Tensor, grad_sq: Tensor | None = None) -> None:
        """Leaves what the next step needs, and keeps what users log."""
        optimizer, ranks = self._optimizer, self._optimizer.collective()
        zero = torch.zeros((), dtype=scalar_dtype(ranks.device), device=ranks.device)
        optimizer._step_before.leave_released(optimizer._buckets.current, step.grad_sqs, ranks)
        if grad_sq is None:
            grad_norm = optimizer._step_before.grad_norm([zero, *step.grad_sqs.values()], NO_GATE, ranks)
        else:
            grad_norm = grad_sq.sqrt()
        optimizer._record(StepScalars(mean, grad_norm, None), NO_GATE)

    def _check(self) -> None:
        check_can_release(self._optimizer._needs_one_pass(), self._optimizer.max_grad_norm, self._optimizer.options)

    def _watch(self) -> None:
        """Has a hook on each parameter that the optimizer has now: groups are added, and wrappers replace tensors."""
        by_id = {
            id(param): (param, group)
            for group in self._optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        }
        if by_id.keys() == self._hooks.keys():
            return
        for gone in self._hooks.keys() - by_id.keys():
            self._hooks.pop(gone).remove()
        for new in by_id.keys() - self._hooks.keys():
            param, group = by_id[new]
            # Alike on all ranks, so that they step together what may have to be redistributed among them.
            ranks = prod(group.size() for group in self._optimizer._ranks.sharding_of(param, group))
            self._hooks[new] = ReleaseHook(self, param, param.numel() * param.element_size() // ranks)
        self._watched = [param for param, _ in by_id.values()]


def has_state(optimizer: FusedAdamS) -> bool:
    return any(isinstance(state, dict) and has_moments(state) for state in optimizer.state.values())


def in_parts(params: list[Tensor], count: int) -> list[list[Tensor]]:
    """Cuts a list into at most so many lists, of about equally many bytes where no parameter is larger."""
    total, before = sum(param.nbytes for param in params), 0
    parts: dict[int, list[Tensor]] = {}
    for param in params:
        parts.setdefault(before * count // max(1, total), []).append(param)
        before += param.nbytes
    return list(parts.values())


class ReleaseHook:
    """Hooks a parameter. Does not keep the optimizer alive, which parameters may outlive."""

    def __init__(self, release: GradientRelease, param: Tensor, size: int) -> None:
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for number in [number for number, hook in hooks.items() if isinstance(hook, ReleaseHook)]:
            del hooks[number]  # of an optimizer that this one takes the place of
        self._release = weakref.ref(release)
        self._size = size
        self._handle = param.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, param: Tensor) -> None:
        release = self._release()
        if release is not None:
            release.take(param, self._size)

    def remove(self) -> None:
        self._handle.remove()


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


def check_can_release(needs_one_pass: bool, max_grad_norm: float | None, options: Options) -> None:
    if max_grad_norm is not None or options.skip_nonfinite:
        got = "skip_nonfinite=True" if max_grad_norm is None else f"max_grad_norm={max_grad_norm!r}"
        raise ValueError(
            f"release_gradients does not go with {got}, which needs the norm of all gradients before the first update. "
            "Leave that out, or gradient release, which remove() of what it returned ends."
        )
    if not needs_one_pass:
        raise ValueError(
            'release_gradients does not go with schedule="exact", whose mean is not known before all gradients are. '
            'Use schedule="lagged", whose mean is that of the step before; or end gradient release by remove() of what '
            "it returned."
        )


def check_step_of_released(has_closure: bool, gives_sum: bool, is_scaled: bool) -> None:
    """Refuses what `step` cannot be told after gradients were released."""
    if has_closure:
        raise RuntimeError(
            "FusedAdamS.step() got a closure with release_gradients() on, wanted none: parameters are stepped while it "
            "runs the backward pass. Call backward() first, then step() without it."
        )
    if gives_sum:
        raise RuntimeError(
            "FusedAdamS.step() got the gradients' sum of squares with release_gradients() on, after most of them were "
            'stepped and freed. Use one of the two: grad_sumsq, or gradient release with schedule="lagged".'
        )
    if is_scaled:
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
