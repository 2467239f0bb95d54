"""FusedAdamS: arguments, state and messages. How a step is taken is in step.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import is_not
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from swd_fused import backends, schedule
from swd_fused.arguments import (
    check_adamw_weight_decay,
    check_grads,
    check_group,
    check_lr_value,
    check_options,
    check_param,
)
from swd_fused.bucket import Active, Arrangement, Bucket
from swd_fused.checkpoint import MOMENTS, loaded_group, loaded_state, moment_dtype, saved_by_param, with_own_steps
from swd_fused.decay_warning import DecayWarning
from swd_fused.schedule import Hyper
from swd_fused.step import take_step

# What belongs to the optimizer as a whole: pickled and copied with it, but in no group and in no state dict.
ATTRIBUTES = (
    "max_grad_norm",
    "schedule",
    "backend",
    "exp_avg_sq_mean",
    "grad_norm",
    "_adamw_weight_decay",
)


class FusedAdamS(Optimizer):
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
        backend: "cpu" (C++), "torch" (plain PyTorch, any device), or "auto", the best there is. `repr` tells which.
    """

    _arrangement: Arrangement | None

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
        backend: str = "auto",
    ) -> None:
        check_options(max_grad_norm, schedule, backend)
        self.max_grad_norm = max_grad_norm
        self.schedule = schedule
        self.backend = backend
        self._adamw_weight_decay: float | None = None
        self._decay_warning = DecayWarning()
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
        super().add_param_group({**param_group, "params": params})

    # --- The step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = self._active()
        if active.params:
            self._take_step(active)
        return loss

    def _active(self) -> Active:
        active = Active([], [], [], [])
        for index, group in enumerate(self.param_groups):
            check_group(group)
            params = group["params"]
            grads = [param.grad for param in params]
            if not all(map(is_not, grads, repeat(None))):
                params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
                grads = [grad for grad in grads if grad is not None]
            active.group_indices.extend([index] * len(params))
            active.params.extend(params)
            active.grads.extend(grads)
        state = self.state
        active.states.extend([state.get(param, {}) for param in active.params])
        return active

    def _take_step(self, active: Active) -> None:
        amsgrads = [group["amsgrad"] for group in self.param_groups]
        first = False
        if self._arrangement is None or not self._arrangement.serves(active, amsgrads):
            check_grads(active.params, active.grads)
            first = not any(active.states)
            active = active._replace(states=[self._initialized(i, p) for i, p in zip(*active[:2], strict=True)])
            self._arrangement = Arrangement(active, amsgrads, self._arrange(active, amsgrads))
        buckets = self._arrangement.buckets
        lagged = self.schedule == "lagged" and not first
        before_update = None if self._adamw_weight_decay is None else self._match_adamw_now
        try:
            for bucket in buckets:
                bucket.begin_step(active.grads, self.param_groups)
            self.exp_avg_sq_mean, self.grad_norm = take_step(buckets, self.max_grad_norm, lagged, before_update)
        finally:
            for bucket in buckets:
                bucket.end_step()
        self._decay_warning.watch(self.exp_avg_sq_mean, self.param_groups)

    def _initialized(self, group_index: int, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            backend, _ = self._backend_of(param)
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = backend.new_moment(param, moment_dtype(param.dtype), param.device)
        for key in MOMENTS:
            if key in state:  # wider where the parameter has become so: the update is computed in the moments' dtype
                state[key] = state[key].to(torch.promote_types(state[key].dtype, param.dtype))
        if self.param_groups[group_index]["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        return state

    def _arrange(self, active: Active, amsgrads: list[bool]) -> list[Bucket]:
        positions = defaultdict(list)
        for position, (index, param) in enumerate(zip(*active[:2], strict=True)):
            backend, _ = self._backend_of(param)
            positions[backend, param.device, amsgrads[index]].append(position)
        return [Bucket(backend, amsgrad, where, active) for (backend, _, amsgrad), where in positions.items()]

    # --- Weight decay, for people who think in AdamW's

    def effective_weight_decay(self) -> list[float]:
        """For each group, the `weight_decay` with which AdamW would shrink the weights as much as this does now.

        At the mean of the last step, NaN before the first. Waits for the device.
        """
        hyper = Hyper(self.param_groups, self.exp_avg_sq_mean.device)
        hyper.set_tensor_lrs(self.param_groups)
        decay = schedule.effective_weight_decay(self.exp_avg_sq_mean, hyper)
        return torch.where(self.exp_avg_sq_mean.isnan(), self.exp_avg_sq_mean, decay).tolist()

    def match_adamw(self, weight_decay: float) -> None:
        """Makes the next step decay as AdamW with this `weight_decay` would; from there on the schedule takes over.

        Sets `weight_decay` in each group that decays at all: at once from the last step's mean, if there is one, and
        exactly in the next step, which knows its own mean and waits for the device this once.
        """
        check_adamw_weight_decay(weight_decay)
        self._adamw_weight_decay = weight_decay
        if 0 < self.exp_avg_sq_mean < math.inf:
            self._set_weight_decay(weight_decay, self.exp_avg_sq_mean)

    def _match_adamw_now(self, exp_avg_sq_mean: Tensor) -> None:
        """Waits for a step with a usable mean: that of zero gradients, or of bad ones, says nothing."""
        if self._adamw_weight_decay is not None and 0 < exp_avg_sq_mean < math.inf:
            self._set_weight_decay(self._adamw_weight_decay, exp_avg_sq_mean)
            self._adamw_weight_decay = None

    def _set_weight_decay(self, adamw_weight_decay: float, exp_avg_sq_mean: Tensor) -> None:
        rms = float(exp_avg_sq_mean.sqrt())
        for group in self.param_groups:
            if group["weight_decay"] > 0:
                group["weight_decay"] = adamw_weight_decay * (rms + group["eps"])
        if self._arrangement is not None:
            for bucket in self._arrangement.buckets:
                bucket.set_hyper(self.param_groups)

    # --- Backends

    def _backend_of(self, param: Tensor) -> tuple[backends.Backend, str]:
        return backends.choose(self.backend, param.device, param.dtype.to_real())

    def __repr__(self) -> str:
        chosen = {self._backend_of(param)[1]: None for group in self.param_groups for param in group["params"]}
        options = {
            "backend": " and ".join(chosen),
            "schedule": self.schedule,
            "max_grad_norm": self.max_grad_norm,
        }
        lines = [f"{name}: {value}" for name, value in options.items()]
        return super().__repr__().replace("(", "(\n" + "\n".join(lines), 1)

    # --- State

    def state_dict(self) -> dict[str, Any]:
        state_dict = super().state_dict()
        return {**state_dict, "state": with_own_steps(state_dict["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved = saved_by_param(self.param_groups, state_dict)
        groups = [
            loaded_group(own, saved_group)
            for own, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for param, values in saved.items():
            state[param] = loaded_state(param, values, self._backend_of(param)[0])
        self.__setstate__({"state": state, "param_groups": groups})
        self._forget()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        state = defaultdict(dict, with_own_steps(self.state))
        return {**super().__getstate__(), "state": state, **{name: getattr(self, name) for name in ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._arrangement = None
        self._decay_warning = DecayWarning()

    def _forget(self) -> None:
        """What only a step can tell."""
        self._arrangement = None
        self.exp_avg_sq_mean = torch.tensor(math.nan, device="cpu")
        self.grad_norm = torch.tensor(math.nan, device="cpu")
