"""FusedAdamS: its arguments, its state, and the ways to call a step. core/step.py takes the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from swd_fused import averages, backends, checkpoints, metrics
from swd_fused.core.sources import StepCall
from swd_fused.core.step import Seams, Stepper, take
from swd_fused.decay import kinds
from swd_fused.decay.kinds import Decay
from swd_fused.decay.observers import Calibration, DecayWarning
from swd_fused.distributed.sharding import ShardedOver, is_distributed
from swd_fused.drivers.compiled import new_handle, step_within_a_graph
from swd_fused.drivers.release import GradientRelease, refuse_step_in_backward
from swd_fused.metrics import ClippedSteps
from swd_fused.new_groups import check_all, checked_defaults, new_group
from swd_fused.observer import Observer
from swd_fused.options import (
    BackendName,
    Compatibility,
    Options,
    Outliers,
    Schedule,
    Setting,
    StateDtype,
    asked_options,
    unwrapped,
)
from swd_fused.outliers import OutlierWatch
from swd_fused.rms_grads import rms_by_param
from swd_fused.state.weights import master_of, refuse_exchanged

ORDINARY_CALL = StepCall()
SCALING = {"grad_scale", "found_inf"}  # attributes that GradScaler sets for a step


class FusedAdamS(Optimizer):
    """Adam with Scheduled Weight Decay: Adam whose decoupled weight decay is divided by the model's rms gradient.

    It replaces `torch.optim.AdamW`, but its `weight_decay` is not AdamW's: it acts as `weight_decay / rms gradient`
    would there. Pass AdamW's value as `adamw_weight_decay`.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer. One schedule covers all
            groups. A group may have its own value of each option in `swd_fused.options.GroupOptions`, such as `lr`,
            `weight_decay` and `state_dtype`. The other options hold for all groups.

        lr: learning rate, a number or a tensor with one element.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominators, including the schedule's.
        weight_decay: the paper's lambda, which is divided by the model's rms gradient. None is 5e-4, the paper's value;
            with decay="decoupled" it is 0.01, as in torch's AdamW, with "l2" 0, as in Adam, with "independent" 1e-5.
        amsgrad: the paper's AMSGradS.
        maximize: ascend instead of descend.

        max_grad_norm: clip the gradients' global norm within the step. `param.grad` is left as it is.
        skip_nonfinite: a step whose gradient norm is not finite changes nothing and is counted in `skipped_steps`.
        outliers: "skip" steps whose gradient norm stands out from the recent ones, or "clip" their gradients.
        outlier_sigma: how many standard deviations above the mean a norm must be to stand out.

        max_decay: no step removes more than this share of a weight. The first time it limits a step, a warning says so.
        schedule: "exact", or "lagged", which uses the mean of the step before and reads memory once, not twice.
        adamw_weight_decay: AdamW's value, in place of `weight_decay`. The first `calibration_steps` decay as AdamW
            would, and the schedule continues from there. Groups with `weight_decay=0` do not decay.
        calibration_steps: 100 by default. The length of the warm-up is a good choice.
        decay: "scheduled" is the paper's; the others have no schedule. "decoupled" is AdamW's, "l2" is Adam's, and
            "independent" removes weight_decay * lr / largest lr of a weight in a step. See docs/weight-decay.md.
        corrected_decay: multiply the decay by lr / largest lr. With "decoupled" that is AdamC.
        cautious_decay: decay only weights that the update does not move away from zero.
        largest_lr: the learning rate's peak. None is the largest so far, kept in groups as `largest_lr_so_far`.

        master_weights: update float32 masters of 16-bit parameters. For bfloat16 the state has the 16 missing bits.
        stochastic_rounding: round bfloat16 parameters up or down stochastically, so that small updates are not lost.
        seed: the seed of stochastic rounding. The same seed gives the same bits.
        state_dtype: "8bit" keeps both moments in 8 bits, except those of small tensors; torch.bfloat16 or torch.float16
            is for the first moment only. By default moments are float32, or float64 for float64 parameters.

        ema_decay: keep an exponential average of the weights, for `averaged_params` and `copy_averages`. Each step
            moves the average of an updated weight towards it by a share of 1 - ema_decay.
        ema_warmup: use min(ema_decay, (1 + t) / (10 + t)) in a parameter's step t, to forget the first weights soon.

        process_group: the ranks to sum over, if plain tensors are shards or differ by rank. DTensors know their ranks.
        total_numel: number of elements of the whole model, if shards are padded.
        backend: "cpu" (C++), "triton" (CUDA, ROCm), "torch" (any device), or "auto", the best; `repr` names it.
        compatibility: keywords of torch's Adam and of apex's FusedAdam, see `swd_fused.options.Compatibility`.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling and skipping to `step`
    _gradient_release: GradientRelease | None  # neither copied nor pickled

    max_grad_norm = Setting()
    outliers = Setting()
    outlier_sigma = Setting()
    schedule = Setting()
    total_numel = Setting()
    backend = Setting()
    grad_sumsq_provider: Callable[[], tuple[Any, int | None]] | None

    @_disable_dynamo
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        # The gradients
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        outliers: Outliers = None,
        outlier_sigma: float = 6.0,
        # The decay
        max_decay: float = 0.1,
        schedule: Schedule = "exact",
        adamw_weight_decay: float | None = None,
        calibration_steps: int | None = None,
        decay: Decay = "scheduled",
        corrected_decay: bool = False,
        cautious_decay: bool = False,
        largest_lr: float | None = None,
        # Mixed precision
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state_dtype: StateDtype = None,
        # The average of the weights
        ema_decay: float | None = None,
        ema_warmup: bool = False,
        # Where parameters are
        process_group: torch.distributed.ProcessGroup | None = None,
        total_numel: int | None = None,
        backend: BackendName = "auto",
        **compatibility: Unpack[Compatibility],
    ) -> None:
        arguments = {**locals(), **compatibility}  # by name: a new option needs no mention here
        options = asked_options(arguments)
        self._new_stepper(options, ShardedOver.checked(process_group), ClippedSteps())
        self.grad_sumsq_provider = None
        super().__init__(params, checked_defaults(arguments, options.decay))
        self._stepper.restart(None, (self.defaults, *self.param_groups), is_fresh=True)
        check_all(options, self.defaults, self.param_groups)

    def _new_stepper(self, options: Options, sharded_over: ShardedOver | None, clipped: ClippedSteps) -> None:
        self._handle = new_handle(self)
        self._calibration, self._clipped, self._outliers = Calibration(), clipped, OutlierWatch()
        observers: list[Observer] = [self._calibration, self._clipped, DecayWarning(), self._outliers]
        self._stepper = Stepper(options, sharded_over, Seams(backends.choose, kinds, observers, self._outliers.gate))
        self._gradient_release = None

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(new_group(param_group, self.defaults, self.options))
        if self._gradient_release is not None:
            self._gradient_release.watch(self.param_groups, self.state)

    def use(self, options: Options, changed: str) -> None:
        """Sets checked options for the next steps. `changed` is the name of the one that is new."""
        for param in self.numbered_params():
            backends.choose(param, options)  # raises if the backend cannot step this parameter
        if self._gradient_release is not None and not self._gradient_release.has_ended:
            self._gradient_release.check_change(changed, getattr(options, changed), options)
        self._stepper.set_options(options)

    @property
    def options(self) -> Options:
        """The options that hold for the whole optimizer."""
        return self._stepper.options

    def numbered_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    # --- The step

    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_sumsq: float | Tensor | None = None,
        numel: int | None = None,
    ) -> Any:
        """Takes a step. Passing `grad_sumsq` saves the pass over the gradients: it is the sum of the squares of all
        elements in `.grad`, on all ranks, before `max_grad_norm` clips. With `numel`, the number of these elements, a
        call may step only some of the parameters, and ranks need not communicate.
        """
        # torch's own wrapper around `step` takes 9 us to find that there are neither hooks nor a profiler.
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or (not torch.compiler.is_dynamo_compiling() and torch._C._autograd._profiler_enabled())
        ):
            return self._step_with_hooks(closure, grad_sumsq=grad_sumsq, numel=numel)
        return self._step(closure, grad_sumsq, numel)

    step.hooked = True  # type: ignore[attr-defined]  # torch then leaves it unwrapped

    def _step(self, closure: Callable[[], float] | None, grad_sumsq: float | Tensor | None, numel: int | None) -> Any:
        loss = None
        release = self._gradient_release
        if release is not None and release.has_ended:
            self._gradient_release = release = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        provider = self.grad_sumsq_provider
        if torch.compiler.is_compiling():
            if grad_sumsq is None and provider is None and release is None and not is_distributed():
                step_within_a_graph(self.numbered_params(), self._handle)
            else:
                self._untraced_step(None, grad_sumsq, numel)
            return loss
        had_grad = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # as torch.no_grad does, in a tenth of its 2 us
            if grad_sumsq is None:
                if numel is not None:
                    raise ValueError(
                        f"step got numel={numel} without grad_sumsq, wanted both: it says how many have that sum."
                    )
                if torch._C._current_graph_task_id() != -1:
                    refuse_step_in_backward()
                if provider is not None:
                    grad_sumsq, numel = provider()
            call = ORDINARY_CALL
            if grad_sumsq is not None or not SCALING.isdisjoint(self.__dict__):
                call = self._step_call(grad_sumsq, numel)
            if release is None:
                take(self._stepper, self.param_groups, self.state, None, call)
            else:
                release.end_step(self.param_groups, self.state, call)
        finally:
            torch._C._set_grad_enabled(had_grad)
        return loss

    _step_with_hooks = Optimizer.profile_hook_step(_step)

    # torch.compile cannot trace process groups and the local parts of DTensors, so a compiled step runs this untraced.
    # torch.compiler.disable would do the same, but makes every import of the package three seconds longer.
    _untraced_step = _disable_dynamo(_step)

    def release_gradients(self) -> GradientRelease:
        """Steps each parameter in the backward pass, when its gradient is complete, and frees the gradient.

        The result is the same bit for bit, and `step()` ends the step as before. Scheduled decay needs
        `schedule="lagged"`. Its first step is exact, so it keeps gradients until `step()`, and may round its mean
        differently in the last bits. Hyper-parameters are read in the backward pass. `remove()` of the returned object
        ends gradient release. Clipping, GradScaler and DistributedDataParallel, which reduces too late, are refused.
        """
        if "_stepper" not in self.__dict__:
            return unwrapped(self).release_gradients()
        if self._gradient_release is None or self._gradient_release.has_ended:
            self._gradient_release = GradientRelease(self._stepper, self.param_groups, self.state)
        return self._gradient_release

    def accumulate_gradients(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only accumulate gradients: for all micro-batches but the last."""
        return nullcontext() if self._gradient_release is None else self._gradient_release.accumulating()

    def sum_over(self, sharded_over: ShardedOver) -> None:
        """Sets `process_group` after construction, for wrappers that make the group."""
        self._stepper.sharded_over = ShardedOver.checked(sharded_over)
        self._stepper.forget()

    def step_with(self, grads: list[Tensor | None]) -> None:
        """Takes a step with these gradients. Called by the custom operator when a compiled graph runs."""
        take(self._stepper, self.param_groups, self.state, grads, self._step_call())

    def _step_call(self, grad_sumsq: float | Tensor | None = None, numel: int | None = None) -> StepCall:
        return StepCall(grad_sumsq, numel, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    def __repr__(self) -> str:
        options = metrics.options_in_use(self._stepper, self.numbered_params())
        asked, steps = self.defaults["adamw_weight_decay"], self.defaults["calibration_steps"]
        if asked is not None:  # groups drop `adamw_weight_decay` when their calibration ends
            options += f"\nadamw_weight_decay: {asked}, for {steps} steps"
        return super().__repr__().replace("(", f"(\n{options}", 1)

    # --- State

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the state as torch's optimizers do: tensors are not copied, and later steps change them.

        Each group's `weight_decay` belongs to the kind of decay that its `decay` names. With "scheduled" it is the
        paper's lambda, far too small for AdamW: pass AdamW `effective_weight_decay()`, see docs/migrating.md.
        """
        refuse_exchanged(self.state, "state_dict()")
        self._calibration.speak(self.param_groups)
        return checkpoints.without_process_groups(super().state_dict())

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a copy of a state dict: FusedAdamS's, torch.optim.Adam's or AdamW's, or another library's FusedAdam's.

        If it was saved with another kind of decay, this optimizer's decay stays as it is, and a warning says so.
        """
        refuse_exchanged(self.state, "load_state_dict()")
        saved = checkpoints.after_hooks(state_dict, self)
        self.__setstate__(checkpoints.loaded(saved, self.param_groups, self.options))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "FusedAdamS got copy.copy, which would share its moments but not what is kept of them beside the state: "
            "sums and step counts. Use copy.deepcopy((model, optimizer)), which keeps both together."
        )

    @_disable_dynamo
    def __getstate__(self) -> dict[str, Any]:
        refuse_exchanged(self.state, "a copy or a pickle")
        return {
            **super().__getstate__(),
            "grad_sumsq_provider": self.grad_sumsq_provider,
            **checkpoints.pickled(self._stepper, self.state, self._clipped),
        }

    @_disable_dynamo
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied optimizer. Loading passes only some of its keys: groups and state."""
        state = state.copy()
        last = None
        if "_stepper" not in self.__dict__:
            options, sharded_over, clipped, skipped_steps, last = state.pop("_beside_state")
            self._new_stepper(options, sharded_over, clipped)
            self._stepper.skipped_steps = skipped_steps
        super().__setstate__(state)
        # Accelerate loads a new optimizer's own, empty state into it: training still begins there.
        self._stepper.restart(last, (self.defaults, *self.param_groups), is_fresh=not self.state)
        if self._gradient_release is not None:
            self._gradient_release.begun = None
            self._gradient_release.watch(self.param_groups, self.state)

    def master_param(self, param: Tensor) -> Tensor:
        """Returns a parameter's float32 master, for export, or the parameter itself if it has no master."""
        return master_of(param, self.state.get(param) or {})

    # --- Averages of weights, see docs/averages.md

    @_disable_dynamo
    def averaged_params(self) -> AbstractContextManager[None]:
        """Returns a context in which parameters have the values of their averages, to evaluate or save the model.

        Weights, masters too, are exchanged with averages in place, and back at the end, even after an exception. Enter
        it on all ranks. Within it, steps are refused, and so is saving or loading the optimizer's state.
        """
        return averages.exchanged(unwrapped(self))

    @_disable_dynamo
    def copy_averages(self, target: torch.nn.Module | Iterable[Tensor]) -> None:
        """Copies averages into a copy of the model, matching parameters by name, or into tensors, one for each of the
        optimizer's parameters, in its order.

        The weight is copied for a parameter without an average. Plain tensors get whole parameters, for which all ranks
        must call this. Buffers are not parameters, and stay as they are.
        """
        averages.copy_to(target, self)

    # --- What users log

    @property
    def exp_avg_sq_mean(self) -> Tensor:
        """The mean of v^ that the last step's schedule used: a zero-dimensional tensor, NaN before the first."""
        return self._stepper.last[0]

    @property
    def grad_norm(self) -> Tensor:
        """The norm of the last step's gradients, unscaled and before clipping: a zero-dimensional tensor."""
        return self._stepper.last[1]

    @property
    def skipped_steps(self) -> Tensor:
        """The number of skipped steps, which have changed nothing: a zero-dimensional tensor of int64."""
        return self._stepper.skipped_steps

    def effective_weight_decay(self) -> list[float]:
        """Returns for each group the `weight_decay` with which AdamW would shrink its weights as much as this does now.

        Uses the last step's mean; NaN before the first. With `cautious_decay` it is that of the weights that decay.
        Waits for the device.
        """
        self._calibration.speak(self.param_groups)
        return metrics.effective_weight_decay(self.param_groups, self.exp_avg_sq_mean)

    def metrics(self) -> dict[str, float]:
        """Returns the last step's numbers for a log. Waits for the device.

        `grad_norm` is the norm before clipping, `rms_grad` the root of the schedule's mean. `<group>` is a group's
        `name` or index: `effective_weight_decay/<group>` is the AdamW value that would shrink its weights as much, and
        `decay_timescale/<group>` the steps in which decay alone would leave 1/e of a weight. `skipped_steps` and
        `clipped_share` (with `max_grad_norm`) cover the steps since this optimizer was made, `outlier_share` (with
        `outliers`) those since training began. A norm above `outlier_threshold` would stand out now.
        """
        self._calibration.speak(self.param_groups)
        found = metrics.metrics(self._stepper, self.param_groups, self._clipped)
        return {**found, **self._outliers.metrics(self.options, self.param_groups)}

    @_disable_dynamo
    def rms_grads(self) -> dict[str | int, float]:
        """Returns the rms gradient of each parameter, by its name if parameters were passed with names, else by number.

        It is the root of the mean of v^, Adam's bias-corrected second moment: an average over recent steps of gradients
        as they were used, after clipping. Parameters that have taken no step are left out. The last step has left the
        sums, so this reads memory only after state was loaded or written to. It covers all shards of DTensors, so all
        ranks must call it, but only the local part of plain tensors. Waits for the device.
        """
        return rms_by_param(self._stepper, self.param_groups, self.state)
