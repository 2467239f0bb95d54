"""FusedAdamS: arguments, state dict, and the ways to call a step. How it is taken is in step.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from swd_fused.adamw_terms import check_some_group_decays, checked_calibration
from swd_fused.bucket import Bucket
from swd_fused.clipped_steps import ClippedSteps
from swd_fused.compiled_step import new_handle, optimizer_step
from swd_fused.decay_warning import DecayWarning
from swd_fused.distributed.sharding import ShardedOver, is_distributed, local_tensor
from swd_fused.gradient_release import GradientRelease
from swd_fused.group_checks import check_new_group, check_params
from swd_fused.moments import warn_without_codes
from swd_fused.options import (
    BackendName,
    Compatibility,
    Decay,
    Options,
    Schedule,
    StateDtype,
    check_backend_name,
    check_compatibility,
    check_schedule,
    check_total_numel,
    check_total_numel_covers,
    check_use_of_precision,
    check_use_of_seed,
    checked_options,
    warn_of_lost_updates,
)
from swd_fused.state import (
    adopt_masters,
    check_state_dict,
    loaded_group,
    loaded_state,
    other_entries,
    saved_by_param,
    with_separate_steps,
)
from swd_fused.step import TakesSteps
from swd_fused.sums import PassOne, StepBefore

# What belongs to the optimizer as a whole: pickled and copied with it, but in no group and in no state dict.
ATTRIBUTES = (
    "max_grad_norm",
    "schedule",
    "total_numel",
    "backend",
    "grad_sumsq_provider",
    "options",
    "set_grad_none",
    "skipped_steps",
    "_clipped_steps",
    "_sharded_over",
    "_last",
)


# Of groups: options that pickles of older versions lack.
ADDED_LATER = {"bias_correction": True, "adamw_weight_decay": None, "calibration_steps": 0, "state_dtype": None}


class FusedAdamS(TakesSteps):
    """Adam with Scheduled Weight Decay: Adam whose decoupled weight decay is divided by the model's rms gradient.

    Takes the place of `torch.optim.AdamW`. `weight_decay` is not AdamW's: it acts like `weight_decay / rms gradient`
    there. Pass AdamW's value as `adamw_weight_decay`.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer. One schedule covers all
            groups. A group may have its own `lr`, `betas`, `eps`, `weight_decay`, `amsgrad`, `maximize`, `max_decay`,
            `bias_correction`, `state_dtype` and `process_group`; the other options hold for all groups.

        lr: learning rate, a number or a tensor with one element.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominators, including the schedule's.
        weight_decay: the paper's lambda, which is divided by the model's rms gradient.
        amsgrad: the paper's AMSGradS.
        maximize: ascend instead of descend.

        max_grad_norm: clip the gradients' global norm within the step. `param.grad` is left as it is.
        skip_nonfinite: a step whose gradient norm is not finite changes nothing and is counted in `skipped_steps`.

        max_decay: no step removes more than this share of a weight. Where it binds a warning says so, once.
        schedule: "exact", or "lagged", which uses the mean of the step before and so needs one pass over memory
            instead of two. A first step is always exact.
        adamw_weight_decay: weight decay in AdamW's terms, in place of `weight_decay`: the first `calibration_steps`
            decay as AdamW would with this value, and the schedule continues from there. Groups with `weight_decay=0`
            do not decay.
        calibration_steps: 100 by default. The warm-up is a good choice.
        decay: "scheduled", the paper's; or, for comparisons with all else equal, "decoupled", AdamW's, or "l2",
            Adam's, for which `weight_decay` means what it does there and the schedule is not used.

        master_weights: keep float32 copies of bfloat16 and float16 parameters in the state, and update those.
        stochastic_rounding: round bfloat16 parameters up or down stochastically, so that small updates are not lost.
        seed: of stochastic rounding. The same seed gives the same bits.
        state_dtype: "8bit" keeps both moments in 8 bits, except those of small tensors; torch.bfloat16 or torch.float16
            is for the first moment only. By default moments are float32, or float64 for float64 parameters.

        process_group: the ranks to sum over, where parameters are plain tensors that are shards or that differ from
            rank to rank. DTensors carry this information themselves.
        total_numel: number of elements of the whole model, where shards are padded.
        backend: "cpu" (C++), "triton" (CUDA and ROCm), "torch" (plain PyTorch, any device), or "auto", the best one
            available. `repr` names the one in use.
        compatibility: keywords of torch's Adam and of apex's FusedAdam, see `swd_fused.options.Compatibility`.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling and skipping to `step`
    _gradient_release: GradientRelease | None = None  # neither copied nor pickled

    @_disable_dynamo
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 5e-4,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        # The gradients
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        # The decay
        max_decay: float = 0.1,
        schedule: Schedule = "exact",
        adamw_weight_decay: float | None = None,
        calibration_steps: int | None = None,
        decay: Decay = "scheduled",
        # Mixed precision
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state_dtype: StateDtype = None,
        # Where parameters are
        process_group: torch.distributed.ProcessGroup | None = None,
        total_numel: int | None = None,
        backend: BackendName = "auto",
        **compatibility: Unpack[Compatibility],
    ) -> None:
        check_compatibility(compatibility)
        adam_w_mode = compatibility.get("adam_w_mode", True)
        self.options = checked_options(decay, adam_w_mode, master_weights, stochastic_rounding, seed, skip_nonfinite)
        check_schedule(schedule, max_grad_norm, self.options)
        check_backend_name(backend)
        check_total_numel(total_numel)
        self.max_grad_norm = max_grad_norm
        self.schedule = schedule
        self.total_numel = total_numel
        self.backend = backend
        self.set_grad_none = compatibility.get("set_grad_none", True)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._clipped_steps = ClippedSteps()
        self.grad_sumsq_provider = None
        self._sharded_over = ShardedOver.checked(process_group)
        self._handle = new_handle(self)
        self._decay_warning = DecayWarning(is_fresh=True)
        self._pass_one = PassOne(self._has_amsgrad)
        self._step_before = StepBefore(self._pass_one)
        self._in_graphs: list[Bucket] = []  # which go on with them, even after other state was loaded
        self._forget()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "max_decay": max_decay,
            **checked_calibration(adamw_weight_decay, calibration_steps, self.options.decay),
            "bias_correction": compatibility.get("bias_correction", True),
            "state_dtype": state_dtype,
        }
        check_new_group({}, defaults)
        if isinstance(params, Iterable) and not isinstance(params, (Tensor, set)):  # torch explains what is wrong there
            params = list(params)  # type: ignore[assignment]
            if not params:
                raise ValueError(
                    "FusedAdamS got no parameters, wanted at least one. Pass model.parameters(); a generator that "
                    "was used before is empty."
                )
        super().__init__(params, defaults)
        check_some_group_decays(adamw_weight_decay, self.param_groups)
        check_use_of_seed(self.options, self.param_groups)
        warn_without_codes(self.param_groups)
        check_use_of_precision(self.options, {param.dtype for param in self.numbered_params()})
        warn_of_lost_updates(self.options, self.param_groups)

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_new_group(param_group, self.defaults)
        params = param_group["params"]
        if isinstance(params, Tensor):
            params = [params]
        elif not isinstance(params, set):  # torch refuses sets, which have no order
            params = list(params)
        named_or_not = [param[1] if isinstance(param, tuple) else param for param in params]
        tensors = [param for param in named_or_not if isinstance(param, Tensor)]  # torch refuses anything else
        check_params(tensors)
        for param in tensors:
            self._backend_of(param)
        here = sum(local_tensor(param).numel() for param in (*self.numbered_params(), *tensors))
        check_total_numel_covers(self.total_numel, here)
        param_group = {**param_group, "params": params, **self._calibration_of(param_group)}
        if "process_group" in param_group:
            param_group["process_group"] = ShardedOver.checked(param_group["process_group"])
        super().add_param_group(param_group)

    # --- The step

    @overload
    def step(
        self, closure: None = None, *, grad_sumsq: float | Tensor | None = None, numel: int | None = None
    ) -> None: ...

    @overload
    def step(
        self, closure: Callable[[], float], *, grad_sumsq: float | Tensor | None = None, numel: int | None = None
    ) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_sumsq: float | Tensor | None = None,
        numel: int | None = None,
    ) -> float | None:
        """Takes a step. `grad_sumsq`, if known, saves the pass over the gradients: the sum of the squares of all that
        is in `.grad`, on all ranks, as its norm before `max_grad_norm` clips. Together with `numel`, its number of
        elements, a call may step some of the parameters only, and ranks need not communicate.
        """
        if self._gradient_release is not None:
            self._gradient_release.end_step(closure, grad_sumsq, numel)
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            self._eager_step(grad_sumsq, numel)
        elif is_distributed():
            self._untraced_step(grad_sumsq, numel)
        elif grad_sumsq is None and self.grad_sumsq_provider is None:
            self._step_within_a_graph()
        else:
            self._eager_step(grad_sumsq, numel)
        return loss

    def release_gradients(self) -> GradientRelease:
        """Steps each parameter in the backward pass, when its gradient is complete, and frees the gradient.

        Needs `schedule="lagged"`, and gives the same result bit for bit. `step()` ends the step as before. The first
        step, which is exact, keeps gradients until then, and may round its mean differently in the last bit of float64,
        or on a GPU in the last bits of float32. `remove()` of what is returned ends gradient release.

        Hyper-parameters are read in the backward pass. Use FSDP2 or a single process: DistributedDataParallel reduces
        gradients too late. Not with clipping or GradScaler, which need all gradients first.
        """
        if self._gradient_release is None:
            self._gradient_release = GradientRelease(self)
        return self._gradient_release

    def accumulate_gradients(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only accumulate gradients: for all micro-batches but the last.

        Without `release_gradients()` they do so anyway.
        """
        return nullcontext() if self._gradient_release is None else self._gradient_release.accumulating()

    # torch.compile cannot trace process groups and the local parts of DTensors: a compiled step runs this as it is.
    # torch.compiler.disable would do the same, and make every import of the package three seconds longer.
    _untraced_step = _disable_dynamo(TakesSteps._eager_step)

    def sum_over(self, sharded_over: ShardedOver) -> None:
        """Sets `process_group` afterwards, for wrappers that make it."""
        self._sharded_over = sharded_over
        self._start_anew()

    def _step_within_a_graph(self) -> None:
        """Only what torch.compile can follow: which parameters have gradients."""
        params, grads, numbers = [], [], []
        for number, param in enumerate(self.numbered_params()):
            if param.grad is not None:
                params.append(param)
                grads.append(param.grad)
                numbers.append(number)
        optimizer_step(params, grads, numbers, self._handle)

    def step_with(self, grads: dict[int, Tensor]) -> None:
        """Takes a step with these gradients. Called by the custom operator when a compiled graph runs."""
        self._take_step([grads.get(number) for number in range(len(self.numbered_params()))], None, None)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __repr__(self) -> str:
        chosen = {self._backend_of(param)[1]: None for group in self.param_groups for param in group["params"]}
        options: dict[str, object] = {
            "backend": " and ".join(chosen),
            "schedule": self.schedule,
            "max_grad_norm": self.max_grad_norm,
        }
        asked_for = self.options._asdict().items() - Options()._asdict().items()
        options.update(sorted(asked_for))
        if self._sharded_over is not None:
            options["process_group"] = str(self._sharded_over)
        lines = [f"{name}: {value}" for name, value in options.items()]
        return super().__repr__().replace("(", "(\n" + "\n".join(lines), 1)

    # --- State

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the state as torch's optimizers do: tensors are not copied, and later steps change them."""
        self._end_calibration()  # a resumed run would not know the mean that it waits for
        state_dict = super().state_dict()
        groups = [
            {key: value for key, value in group.items() if key != "process_group"}
            for group in state_dict["param_groups"]
        ]
        return {**state_dict, "param_groups": groups}

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state dict: this optimizer's, or one of torch.optim.Adam, AdamW or another library's FusedAdam."""
        check_state_dict(state_dict)
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        check_state_dict(state_dict)
        saved = saved_by_param(self.param_groups, state_dict)
        groups = []
        for own, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            groups.append(loaded_group(own, saved_group, self.options))
        state: defaultdict[Any, Any] = defaultdict(dict, other_entries(state_dict))
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be stepped later
            for group in groups:
                for param in filter(saved.__contains__, group["params"]):
                    state[param] = loaded_state(param, saved[param], self._backend_of(param)[0], self.options, group)
        adopt_masters(saved, self.options)
        self.__setstate__({"state": state, "param_groups": groups})
        self._forget()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @_disable_dynamo
    def __getstate__(self) -> dict[str, Any]:
        state = defaultdict(dict, with_separate_steps(self.state))
        return {**super().__getstate__(), "state": state, **{name: getattr(self, name) for name in ATTRIBUTES}}

    @_disable_dynamo
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in ADDED_LATER.items():
                group.setdefault(key, value)
        self._handle = new_handle(self)
        self.__dict__.setdefault("_in_graphs", [])
        self.__dict__.setdefault("_clipped_steps", ClippedSteps())  # pickles of older versions lack it
        self._pass_one = PassOne(self._has_amsgrad)
        self._step_before = self.__dict__.get("_step_before") or StepBefore(self._pass_one)
        self._start_anew()
        self._decay_warning = DecayWarning(is_fresh=not self.state)  # Accelerate loads what is new into itself
