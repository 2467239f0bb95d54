"""FusedAdamS: arguments, state and messages. How a step is taken is in step.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from swd_fused import backends, captures, known_sum
from swd_fused.active import Active, active_params
from swd_fused.adamw_terms import InAdamWTerms
from swd_fused.arguments import (
    check_flags,
    check_grads,
    check_group,
    check_lr_value,
    check_not_in_backward,
    check_options,
    check_param,
    check_total_numel,
    checked_decay,
)
from swd_fused.bucket import Arrangement, Bucket
from swd_fused.checkpoint import loaded_group, loaded_state, saved_by_param, with_own_steps
from swd_fused.compiled_step import new_handle, optimizer_step
from swd_fused.decay_warning import DecayWarning
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import ShardedOver, is_distributed
from swd_fused.distributed.whole_model import WholeModel
from swd_fused.known_sum import Known, WholeModelSum
from swd_fused.lagged_sums import LaggedSums
from swd_fused.loss_scale import LossScale
from swd_fused.options import Options
from swd_fused.precision import check_precision, check_use_of_precision
from swd_fused.state import initialized
from swd_fused.step import Number, exact, lagged, take_step
from swd_fused.upload import moved, upload

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
    "_sharded_over",
    "exp_avg_sq_mean",
    "grad_norm",
    "_adamw_weight_decay",
)


class FusedAdamS(InAdamWTerms):
    """Adam with Scheduled Weight Decay: Adam whose decoupled weight decay is divided by the model's rms gradient.

    Takes the place of `torch.optim.AdamW`. `weight_decay` is not AdamW's: it acts like AdamW's value times the rms
    gradient, see `match_adamw` and `effective_weight_decay`.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer. One schedule covers all
            groups.
        lr: learning rate, a number or a tensor with one element.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominators, that of the schedule too.
        weight_decay: the paper's lambda.
        amsgrad: the paper's AMSGradS.
        maximize: ascend instead of descend.
        max_grad_norm: clip the gradients' global norm within the step. `param.grad` is left as it is.
        max_decay: no step removes more than this share of a weight. Where it binds a warning says so, once.
        schedule: "exact", or "lagged", which uses the mean of the step before and so needs one pass over memory
            instead of two. A first step is always exact.
        process_group: over which ranks to sum, where parameters are plain tensors that are shards or different from
            rank to rank. A group of parameters may have a `process_group` of its own. DTensors say so themselves.
        total_numel: number of elements of the whole model, where shards are padded.
        decay: "scheduled", the paper's; or for comparison with all else equal "decoupled", AdamW's, or "l2", Adam's.
            With these `weight_decay` is what it is there, and the schedule is not used.
        master_weights: keep float32 copies of bfloat16 and float16 parameters in the state, and update those.
        stochastic_rounding: round bfloat16 parameters up or down by chance, so that small updates are not lost.
        seed: of stochastic rounding. The same seed gives the same bits.
        state_dtype: of the first moment, for example torch.bfloat16; by default float32, or float64 for float64.
        exp_avg_sq_dtype: of the second moment. In bfloat16 it stalls: with a beta of 0.999 a step changes less of it
            than it resolves.
        skip_nonfinite: a step whose gradient norm is not finite changes nothing and is counted in `skipped_steps`.
        bias_correction, adam_w_mode, set_grad_none, capturable: as apex's FusedAdam has them. `adam_w_mode=False` is
            `decay="l2"`. Steps on the "triton" backend can always be captured in a CUDA graph.
        backend: "cpu" (C++), "triton" (CUDA and ROCm), "torch" (plain PyTorch, any device), or "auto", the best there
            is. `repr` tells which.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling and skipping to `step`
    _whole_model: WholeModel
    _whole_model_sum: WholeModelSum
    _lagged_sums: LaggedSums

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 5e-4,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        max_decay: float = 0.1,
        schedule: str = "exact",
        process_group: torch.distributed.ProcessGroup | None = None,
        total_numel: int | None = None,
        decay: str = "scheduled",
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        skip_nonfinite: bool = False,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        set_grad_none: bool = True,
        capturable: bool = False,
        backend: str = "auto",
    ) -> None:
        check_options(max_grad_norm, schedule, backend)
        check_total_numel(total_numel)
        check_precision(master_weights, stochastic_rounding, seed, state_dtype, exp_avg_sq_dtype)
        check_flags(
            skip_nonfinite=skip_nonfinite,
            bias_correction=bias_correction,
            adam_w_mode=adam_w_mode,
            set_grad_none=set_grad_none,
            capturable=capturable,
        )
        decay = checked_decay(decay, adam_w_mode, schedule, skip_nonfinite)
        self.options = Options(
            decay,
            bias_correction,
            master_weights,
            seed if stochastic_rounding else None,
            state_dtype,
            exp_avg_sq_dtype,
            skip_nonfinite,
        )
        self.set_grad_none = set_grad_none
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self.max_grad_norm = max_grad_norm
        self.schedule = schedule
        self.total_numel = total_numel
        self.backend = backend
        self.grad_sumsq_provider: Callable[[], tuple[float | Tensor, int | None]] | None = None
        self._sharded_over = ShardedOver.checked(process_group)
        self._adamw_weight_decay = None
        self._handle = new_handle(self)
        self._decay_warning = DecayWarning()
        self._lagged_sums = LaggedSums()
        self._moments_in_graphs: list[object] = []  # which graphs go on to use after others were loaded
        self._forget()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "max_decay": max_decay,
        }
        check_group(defaults)
        if isinstance(params, Iterable) and not isinstance(params, (Tensor, set)):  # torch explains what is wrong there
            params = list(params)  # type: ignore[assignment]
            if not params:
                raise ValueError(
                    "FusedAdamS got no parameters, wanted at least one. Pass model.parameters(); a generator that "
                    "was used before is empty."
                )
        super().__init__(params, defaults)
        check_use_of_precision(self.options, [param.dtype for group in self.param_groups for param in group["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_group({**self.defaults, **param_group})
        check_lr_value(param_group.get("lr", self.defaults["lr"]))
        params = param_group["params"]
        if isinstance(params, Tensor):
            params = [params]
        elif not isinstance(params, set):  # torch refuses sets, which have no order
            params = list(params)
        for param in params:
            tensor = param[1] if isinstance(param, tuple) else param
            if isinstance(tensor, Tensor):
                check_param(tensor)
                self._backend_of(tensor)
        param_group = {**param_group, "params": params}
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_distributed():
            self._untraced_step(grad_sumsq, numel)
        elif torch.compiler.is_compiling() and grad_sumsq is None and self.grad_sumsq_provider is None:
            self._step_within_a_graph()
        else:
            self._eager_step(grad_sumsq, numel)
        return loss

    def _eager_step(self, grad_sumsq: float | Tensor | None, numel: int | None) -> None:
        check_not_in_backward(grad_sumsq)
        if grad_sumsq is None and numel is not None:
            raise ValueError(f"step got numel={numel} without grad_sumsq, wanted both: it says how many have that sum.")
        if grad_sumsq is None and self.grad_sumsq_provider is not None:
            grad_sumsq, numel = self.grad_sumsq_provider()
        grads = [param.grad for param in self.numbered_params()]
        collective = self.collective(check=grad_sumsq is None)
        known = None
        if grad_sumsq is not None:
            is_lagged = self.schedule == "lagged"
            known = known_sum.checked(grad_sumsq, numel, self.param_groups, is_lagged, collective.device)
        self._step(grads, collective, known)

    # torch.compile cannot trace process groups and the local parts of DTensors: a compiled step runs this as it is.
    # torch.compiler.disable would do the same, and make every import of the package three seconds longer.
    _untraced_step = _disable_dynamo(_eager_step)

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
        """What a graph comes back to."""
        self._step([grads.get(number) for number in range(len(self.numbered_params()))], self.collective(), None)

    def numbered_params(self) -> list[Tensor]:
        """All parameters, in the order of their groups."""
        return [param for group in self.param_groups for param in group["params"]]

    def _step(self, grads: list[Tensor | None], collective: Collective, known: Known | None) -> None:
        active = active_params(self.param_groups, grads, self.state)
        if known is None or known.numel is None:
            self._whole_model_sum = WholeModelSum()
        if active.params or not collective.is_local:
            self._take_step(active, collective, known)

    def collective(self, check: bool = True) -> Collective:
        """All-reduces over the ranks that share this optimizer's parameters."""
        return self._whole_model.collective(self.param_groups, check)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _take_step(self, active: Active, collective: Collective, known: Known | None) -> None:
        amsgrads = [group["amsgrad"] for group in self.param_groups]
        first, before = False, self._arrangement
        capturing = any(captures.is_capturing(param.device) for param in active.params[:1])
        if capturing:
            self._check_capture(active, collective, known)
        if self._arrangement is None or not self._arrangement.serves(active, amsgrads):
            check_grads(active.params, active.grads)
            first = not any(active.states)
            active = active._replace(states=[self._initialized(i, p) for i, p in zip(*active[1:3], strict=True)])
            self._arrangement = Arrangement(active, amsgrads, self._arrange(active, amsgrads))
        buckets = self._arrangement.buckets
        loss_scale = LossScale(
            getattr(self, "grad_scale", None), getattr(self, "found_inf", None), self.options.skip_nonfinite
        )
        use_lagged = self._needs_one_pass() and not (first and collective.is_local)
        # Of graphs nobody tells which one took the last step, and with which parameters.
        knows_last = not any(bucket.is_stepped_by_graphs() for bucket in buckets)
        took_last_step = (before if before and knows_last else self._arrangement).buckets if use_lagged else []
        if use_lagged and loss_scale.may_skip and collective.is_local:
            use_lagged = not all(bucket.is_known_to_be_new() for bucket in took_last_step)
        before_update = None if self._adamw_weight_decay is None else self._match_adamw_now

        def number() -> Number:
            """All ranks come to the same branch, whatever gradients and state each of them has."""
            if known is not None:
                return self._known_number(known, active, buckets, collective, loss_scale)
            if not use_lagged:
                return exact(buckets, collective, self.max_grad_norm, self.total_numel, any(amsgrads), loss_scale)
            if not collective.is_local:
                return self._lagged_sums.number(buckets, collective, self.total_numel, any(amsgrads), loss_scale)
            for bucket in took_last_step:
                bucket.prepare(self.param_groups)
            return lagged(took_last_step, collective, self.total_numel, loss_scale)

        alone = len(buckets) == 1 and collective.is_local and known is None and self.total_numel is None
        alone = alone and before_update is None and (not use_lagged or took_last_step is buckets)
        try:
            for bucket in buckets:
                bucket.begin_step(active.grads, self.param_groups)
            fused = None
            if alone:
                scale = loss_scale.on(buckets[0].device)
                fused = buckets[0].backend.step(buckets[0], self.max_grad_norm, use_lagged, scale)
            result = fused or take_step(buckets, number, loss_scale, before_update)
            self.exp_avg_sq_mean, self.grad_norm, skip = result
            if skip is not None and loss_scale.may_skip and not self._whole_model_sum.goes_on:
                self._count_skipped(skip)
            if use_lagged and not collective.is_local:
                self._lagged_sums.leave(buckets, collective, loss_scale)
        except BaseException:
            self._arrangement = before  # the one that took the last step
            raise
        else:
            if capturing:  # what was made belongs to the graph
                self._arrangement = before
                self._moments_in_graphs.append([bucket.moments for bucket in buckets])
        finally:
            for bucket in buckets:
                bucket.end_step()
        if self.options.decay == "scheduled":
            self._decay_warning.watch(self.exp_avg_sq_mean, self.param_groups)

    def _count_skipped(self, skip: Tensor) -> None:
        """In place: a CUDA graph adds to the same number in each replay."""
        if self.skipped_steps.device != skip.device:
            if captures.is_capturing(skip.device):
                raise RuntimeError(
                    "FusedAdamS got the first step that may be skipped in the capture of a CUDA graph, which would set "
                    "skipped_steps back in each replay. Take such a step before, on a side stream."
                )
            is_on_host = self.skipped_steps.is_cpu
            self.skipped_steps = (upload if is_on_host else moved)(self.skipped_steps, skip.device)
        self.skipped_steps.add_(skip.to(torch.int64))

    def _check_capture(self, active: Active, collective: Collective, known: Known | None) -> None:
        """Refuses what a graph could not do again in each replay."""
        if self._arrangement is None or not all(active.states):
            raise RuntimeError(
                "FusedAdamS got the first step of some parameters in the capture of a CUDA graph, which would start "
                "them anew in each replay. Take a step with the same gradients before, on a side stream."
            )
        if known is not None and known.numel is not None:
            raise RuntimeError(
                "FusedAdamS got step(grad_sumsq=, numel=) in the capture of a CUDA graph, where the sum of the whole "
                "model cannot be carried on. Leave out numel, and step all parameters at once."
            )
        if self.schedule == "lagged" and not collective.is_local:
            raise RuntimeError(
                'FusedAdamS got a step with schedule="lagged" over several ranks in the capture of a CUDA graph: the '
                'sums of the step before are on their way between the ranks. Use schedule="exact".'
            )

    def _needs_one_pass(self) -> bool:
        """Whether nothing of this step's gradients must be known before the update."""
        if self.options.decay == "scheduled":
            return self.schedule == "lagged"
        return self.max_grad_norm is None and not self.options.skip_nonfinite

    def _known_number(
        self, known: Known, active: Active, buckets: list[Bucket], collective: Collective, loss_scale: LossScale
    ) -> Number:
        if known.numel is None:
            return known_sum.number(known, buckets, collective, self.max_grad_norm, self.total_numel, loss_scale)
        if any(bucket.is_stepped_by_graphs() for bucket in buckets):
            raise RuntimeError(
                "FusedAdamS got step(grad_sumsq=, numel=) after steps of a CUDA graph, which the carried sum of the "
                "whole model would leave out. Leave out numel, and step all parameters at once."
            )
        if not loss_scale.may_skip:  # a step that is skipped would leave none
            for bucket in buckets:
                bucket.need_no_sums()
        beta2, bias_correction = self.param_groups[0]["betas"][1], self.options.bias_correction
        loaded = partial(self._whole_model.sums_of_state, self.param_groups, self.state)
        return self._whole_model_sum.number(
            known, active.params, beta2, bias_correction, self.max_grad_norm, loss_scale, collective, loaded
        )

    def _initialized(self, group_index: int, param: Tensor) -> dict[str, Any]:
        amsgrad = self.param_groups[group_index]["amsgrad"]
        return initialized(self.state[param], param, self.options, amsgrad, self._backend_of(param)[0])

    def _arrange(self, active: Active, amsgrads: list[bool]) -> list[Bucket]:
        positions = defaultdict(list)
        for position, (index, param) in enumerate(zip(*active[1:3], strict=True)):
            backend, _ = self._backend_of(param)
            sharding = self._whole_model.sharding_of(param, self.param_groups[index])
            has_master = self.options.needs_master(param.dtype)
            positions[backend, param.device, amsgrads[index], has_master, sharding].append(position)
        return [
            Bucket(backend, amsgrad, has_masters, where, active, self.options, sharding)
            for (backend, _, amsgrad, has_masters, sharding), where in positions.items()
        ]

    # --- Backends

    def _backend_of(self, param: Tensor) -> tuple[backends.Backend, str]:
        return backends.choose(self.backend, param.device, param.dtype.to_real())

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

    def state_dict(self) -> dict[str, Any]:
        state_dict = super().state_dict()
        groups = [
            {key: value for key, value in group.items() if key != "process_group"}
            for group in state_dict["param_groups"]
        ]
        return {**state_dict, "state": with_own_steps(state_dict["state"]), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved = saved_by_param(self.param_groups, state_dict)
        groups = [
            loaded_group(own, saved_group, self.options)
            for own, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for param, values in saved.items():
            state[param] = loaded_state(param, values, self._backend_of(param)[0], self.options)
        self.__setstate__({"state": state, "param_groups": groups})
        self._forget()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        state = defaultdict(dict, with_own_steps(self.state))
        return {**super().__getstate__(), "state": state, **{name: getattr(self, name) for name in ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = new_handle(self)
        self._lagged_sums = self.__dict__.get("_lagged_sums", LaggedSums())
        self.__dict__.setdefault("_moments_in_graphs", [])
        self._start_anew()
        self._decay_warning = DecayWarning()

    def _forget(self) -> None:
        """What only a step can tell."""
        self._start_anew()
        self.exp_avg_sq_mean = torch.tensor(math.nan, device="cpu")
        self.grad_norm = torch.tensor(math.nan, device="cpu")

    def _start_anew(self) -> None:
        """What is kept from step to step beside the state."""
        self._arrangement = None
        self._whole_model = WholeModel(self._sharded_over)
        self._lagged_sums.abandon()
        self._whole_model_sum = WholeModelSum()
