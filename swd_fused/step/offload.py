"""Offload: moments and masters in host memory, parameters on the GPU; the CPU's kernels step host twins of these."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from swd_fused.distributed.wrappers import refuse_ranks_of_offloaded
from swd_fused.options import Options
from swd_fused.state.moments import has_moments
from swd_fused.step.hooks import GradientTaker, StepCall
from swd_fused.step.offloaded_scaling import is_scaled, refuse_scaler_in_backward, scaling_on_host
from swd_fused.step.overlap import OverlappedStep, Slots
from swd_fused.step.release import params_of, refuse_step_in_backward
from swd_fused.step.stepper import Groups, Stepper
from swd_fused.step.sums import provided, refuse_numel_alone
from swd_fused.tensors import graphs
from swd_fused.tensors.bucket import as_real
from swd_fused.tensors.description import State
from swd_fused.tensors.hyper import scalar_dtype
from swd_fused.tensors.twins import Copies, Twins, dense_strides, is_offloaded, pinned_like


class KeptGradients:
    """Gradients that wait on the host for `optimizer.step()`, since the step needs all of them first."""

    def __init__(self, count: int) -> None:
        """`count` is how many there may be at most."""
        self.grads: dict[Tensor, Tensor] = {}
        self.arrivals: list[torch.cuda.Event] = []
        self._count = count
        self._memory: Iterator[Tensor] | None = None  # for sums
        self._grad_sqs: dict[Tensor, Tensor] = {}

    def has_taken(self, param: Tensor) -> bool:
        return param in self.grads

    def take(self, param: Tensor, grad: Tensor, memory: Tensor, copies: Copies) -> None:
        """Starts to copy a gradient to the host, and the sum of its squares, which the GPU computes."""
        grad_sq = sum_of_squares(as_real(grad))
        if self._memory is None:
            self._memory = iter(torch.empty(self._count, dtype=grad_sq.dtype, device="cpu", pin_memory=True).unbind())
        self.grads[param] = memory
        self._grad_sqs[param] = sum_on_host = next(self._memory)
        self.arrivals.append(copies.to_host((sum_on_host, grad_sq), (memory, grad)))

    def grad_sq(self, param: Tensor) -> float | None:
        """Returns the sum of the squares of a gradient that was taken, after it has arrived."""
        return float(self._grad_sqs[param]) if param in self._grad_sqs else None

    def let_go(self, params: Iterable[Tensor]) -> None:
        """Forgets gradients that were stepped."""
        for param in params:
            self.grads.pop(param, None)
            self._grad_sqs.pop(param, None)

    def drop_gradients(self) -> None:
        self.grads, self._grad_sqs, self._memory = {}, {}, None

    def wait(self) -> None:
        """Has nobody to wait for."""


class Offload(GradientTaker):
    """Takes the steps of an optimizer whose parameters are on a GPU and whose state is not.

    Each gradient is copied to the host when it is complete, and freed. A step that needs nothing of other gradients
    goes on at once, in a thread of its own; any other one waits for `optimizer.step()`, and is then an ordinary step
    of the twins.
    """

    def __init__(self, stepper: Stepper) -> None:
        super().__init__()
        self._stepper = stepper
        self._twins = Twins()
        self._kept_memory: dict[Tensor, Tensor] = {}  # of gradients, from step to step
        self._slots = Slots()
        self._worker: tuple[int, ThreadPoolExecutor] | None = None  # and the process that it is in
        self._knows_wrappers = False
        self._step: KeptGradients | OverlappedStep | None = None
        self._is_scaled: bool | None = None  # whether the last step was a GradScaler's, if there was any

    def watch(self, groups: Groups, state: State) -> None:
        self._groups, self._state = groups, state
        if self.hook(params_of(groups), lambda _: 0):
            self._knows_wrappers = False
        if len(self._kept_memory) > len(self._hooks):
            self._kept_memory = {}

    def check_change(self, name: str, value: object, options: Options) -> None:
        self.check_between_steps(f"{name}={value!r}")

    def check_between_steps(self, what: str) -> None:
        if isinstance(self._step, OverlappedStep):
            raise RuntimeError(
                f"FusedAdamS got {what} after a backward pass that has begun to step parameters already, with "
                "offload=True, wanted it between steps. Call optimizer.step() first."
            )

    def drop_gradients(self) -> None:
        with self._lock:
            if self._step is not None:
                self._step.drop_gradients()

    def settle(self) -> None:
        with self._lock:
            if self._step is not None:
                self._step.wait()

    def forget(self) -> None:
        self.settle()
        if isinstance(self._step, OverlappedStep):
            self._step.abandon(self._slots)
        self._step = None
        self._twins.forget()

    # --- The backward pass

    @_disable_dynamo
    @torch.no_grad()
    def take(self, param: Tensor, _: int) -> None:
        with self._lock:
            grad = leaving_grad(param, self._stepper.options)
            if self._accumulating or grad is None:
                return
            refuse_capture(param.device)
            step = self._begun()
            if step.has_taken(param):
                raise RuntimeError(second_gradient(param))
            if isinstance(step, OverlappedStep):
                step.take(param, grad, self._slots)
            else:
                step.take(param, grad, self._memory_for(param, grad), self._twins.copies)
            param.grad = None

    def _begun(self) -> KeptGradients | OverlappedStep:
        if self._step is None:
            params = params_of(self._groups)
            self._check_wrappers(params)
            arrivals = self._twins.prepare(params, self._stepper.options, self._state)
            if self._overlaps():
                for event in arrivals:
                    event.synchronize()
                self._kept_memory = {}
                state = self._state_of_twins()
                self._step = OverlappedStep(
                    self._stepper, self._twins, self._groups, params, state, self._worker_of_process()
                )
            else:
                self._step = KeptGradients(len(params))
                self._step.arrivals += arrivals
        return self._step

    def _check_wrappers(self, params: list[Tensor]) -> None:
        if not self._knows_wrappers:  # the model may have been wrapped in the meantime
            refuse_ranks_of_offloaded(param for param in params if is_offloaded(param, self._stepper.options))
            self._knows_wrappers = True

    def _overlaps(self) -> bool:
        """Returns whether a step needs nothing that is still to come: it is lagged, or decays by no schedule, and not
        the first one. Hyper-parameters that are on a GPU are for the thread that has its streams. Nobody knows in a
        backward pass whether the loss is scaled, so this optimizer's first step waits for whoever calls it."""
        if not self._stepper.options.needs_one_pass or self._is_scaled is not False:
            return False
        hyper = [value for group in self._groups for value in (group["lr"], *group["betas"])]
        if any(isinstance(value, Tensor) and not value.is_cpu for value in hyper):
            return False
        stepped = self._twins.stepped_for(params_of(self._groups))
        on_host = [param for param, host in zip(params_of(self._groups), stepped, strict=True) if host.is_cpu]
        return any(has_stepped(self._state.get(param)) for param in on_host if param.numel())

    def _memory_for(self, param: Tensor, grad: Tensor) -> Tensor:
        """Returns host memory for a gradient. Where only the first step waits for all of them it is needed once."""
        if self._stepper.options.needs_one_pass and self._is_scaled is None:
            return torch.empty_like(grad, device="cpu", requires_grad=False)
        if not self._kept_memory:
            hooked = [param for param in params_of(self._groups) if id(param) in self._hooks]
            params = [param for param in hooked if is_offloaded(param, self._stepper.options)]
            self._kept_memory = dict(zip(params, pinned_like(params), strict=True))
        memory = self._kept_memory.get(param)
        if memory is None or memory.dtype != grad.dtype or memory.shape != grad.shape:
            memory = self._kept_memory[param] = pinned_like([grad])[0]
        # In the gradient's own order, which need not be the parameter's: other copies would wait for the GPU.
        return memory.as_strided(grad.shape, dense_strides(grad))

    def _worker_of_process(self) -> ThreadPoolExecutor:
        """Returns the thread that steps. A process that was forked has none of its parent's."""
        if self._worker is None or self._worker[0] != os.getpid():
            self._worker = os.getpid(), ThreadPoolExecutor(1, "swd_fused-offload")
        return self._worker[1]

    # --- The step

    @_disable_dynamo
    def end_step(self, groups: Groups, state: State, call: StepCall) -> float | None:
        """Takes the step with the gradients that are on the host, or ends it where they were stepped already."""
        loss = None
        if call.closure is not None:
            with torch.enable_grad():
                loss = call.closure()
        if torch._C._current_graph_task_id() != -1:
            refuse_step_in_backward()
        if is_scaled(call) and (self._stepper.options.schedule == "lagged" or isinstance(self._step, OverlappedStep)):
            refuse_scaler_in_backward()
        if call.grad_sumsq is None:
            if call.numel is not None:
                refuse_numel_alone(call.numel)
            if call.provider is not None:
                grad_sumsq, numel = provided(call.provider())
                call = call._replace(grad_sumsq=grad_sumsq, numel=numel)
        with torch.inference_mode(False), torch.no_grad(), self._lock:
            self._groups, self._state = groups, state
            self._end_step(call)
            self._is_scaled = is_scaled(call)
            for param in params_of(groups):
                if param.is_cuda:  # small ones still have it
                    param.grad = None
            self.watch(groups, state)
        return loss

    def _end_step(self, call: StepCall) -> None:
        params, begun = params_of(self._groups), self._step
        self._check_wrappers(params)
        for device in {param.device for param in params if param.is_cuda}:
            refuse_capture(device)
        again = [param for param in params if param.grad is not None and begun is not None and begun.has_taken(param)]
        if again:
            raise RuntimeError(second_gradient(again[0]))
        if isinstance(begun, OverlappedStep):
            self._end_overlapped(begun, params, call)
        else:
            self._step_twins(begun or KeptGradients(0), params, call)

    def _step_twins(self, kept: KeptGradients, params: list[Tensor], call: StepCall) -> None:
        """Takes an ordinary step with all gradients, and starts to copy its results to the GPU."""
        options, twins, copies = self._stepper.options, self._twins, self._twins.copies
        rest = KeptGradients(len(params))  # that no hook has seen
        for param in params:
            grad = leaving_grad(param, options)
            if grad is not None:
                rest.take(param, grad, torch.empty_like(grad, device="cpu"), copies)
        taken = {**kept.grads, **rest.grads}
        grads = [taken.get(param, param.grad) for param in params]
        arrivals = kept.arrivals + rest.arrivals + twins.prepare(params, options, self._state)
        pairs = zip(params, grads, strict=True)
        stepped = [p for p, grad in pairs if grad is not None and is_offloaded(p, options)]
        followed = [twins.follow(param) for param in stepped]
        for event in (*arrivals, *filter(None, followed)):
            event.synchronize()
        copies.wait_for_last()
        state = self._state_of_twins()
        grad_sqs = [(rest if rest.has_taken(param) else kept).grad_sq(param) for param in params]
        try:
            scaling = scaling_on_host(call, grad_sqs)
            hosts = twins.stepped_for(params)
            self._stepper.take(self._groups, state, grads, scaling, call.grad_sumsq, call.numel, hosts, grad_sqs)
        except BaseException:
            twins.forget()
            raise
        finally:
            self._adopt(state)
        twins.copy_back(stepped)
        copies.join()
        kept.let_go(params)
        if not kept.grads:
            self._step = None

    def _end_overlapped(self, begun: OverlappedStep, params: list[Tensor], call: StepCall) -> None:
        if call.grad_sumsq is not None and self._stepper.options.schedule == "lagged":
            raise RuntimeError(
                'FusedAdamS.step() got the gradients\' sum of squares with schedule="lagged", which looks at no '
                'gradient of this step. Use schedule="exact".'
            )
        leaving = {param: leaving_grad(param, self._stepper.options) for param in params}
        grads = {param: param.grad if grad is None else grad.cpu() for param, grad in leaving.items()}
        rest = {param: grad for param, grad in grads.items() if grad is not None}
        followed = [self._twins.follow(param) for param in rest if is_offloaded(param, self._stepper.options)]
        for event in filter(None, followed):
            event.synchronize()
        try:
            begun.end(rest, self._slots)
        except BaseException:
            self._twins.forget()
            raise
        finally:
            begun.wait()
            self._twins.copies.join()
            self._adopt(begun.state)
            self._step = None

    def _state_of_twins(self) -> State:
        """Returns the state by twin in place of parameter. The entries are the same."""
        params = [key for key in self._state if isinstance(key, Tensor)]
        return {host: self._state[param] for param, host in zip(params, self._twins.stepped_for(params), strict=True)}

    def _adopt(self, state: State) -> None:
        """Takes up entries that a step has made."""
        params = params_of(self._groups)
        for param, host in zip(params, self._twins.stepped_for(params), strict=True):
            if host in state:
                self._state[param] = state[host]


def new_offload(stepper: Stepper, groups: Groups, state: State) -> Offload | None:
    """Returns what takes the steps of an optimizer that is to be offloaded, if there may be a GPU."""
    if not stepper.options.offload or not torch.cuda.is_available():
        return None
    offload = Offload(stepper)
    offload.watch(groups, state)
    return offload


def has_stepped(entry: object) -> bool:
    return isinstance(entry, dict) and has_moments(entry) and float(entry.get("step", 0)) > 0


def sum_of_squares(grad: Tensor) -> Tensor:
    """Adds in float64. torch's other norms would make a copy in float64 first, twice as large as the gradient."""
    norm: Tensor = torch._foreach_norm([grad], 2, dtype=scalar_dtype(grad.device))[0]
    return norm.square()


def leaving_grad(param: Tensor, options: Options) -> Tensor | None:
    """Returns the gradient that a parameter has and that is stepped on the host. A sparse one is refused there."""
    grad = param.grad
    if grad is None or grad.layout is not torch.strided or not is_offloaded(param, options):
        return None
    return grad.detach()


# --- What it does not go with


def refuse_capture(device: torch.device) -> None:
    if graphs.is_capturing(device):
        raise RuntimeError(
            "FusedAdamS got a gradient or a step in the capture of a CUDA graph, with offload=True: a replay could not "
            "step on the CPU. Train without a graph, or without offload."
        )


def refuse_release() -> NoReturn:
    raise ValueError(
        "release_gradients does not go with offload=True, with which gradients are freed in the backward pass already. "
        "Leave one of the two out."
    )


def second_gradient(param: Tensor) -> str:
    return (
        f"A parameter of shape {tuple(param.shape)} got a second gradient before optimizer.step(), but with "
        "offload=True its first one has left the GPU. To accumulate gradients over several backward passes run all but "
        "the last within optimizer.accumulate_gradients(). To drop the gradients of a backward pass call "
        "optimizer.zero_grad()."
    )
