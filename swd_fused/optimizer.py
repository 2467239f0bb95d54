"""FusedAdamS: arguments, state and messages. How a step is taken is in step.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from swd_fused import backends, schedule
from swd_fused.arguments import (
    check_adamw_weight_decay,
    check_group,
    check_lr_value,
    check_options,
    check_param,
    is_usable,
    refused_grad,
)
from swd_fused.bucket import Bucket, BucketKey, Carried
from swd_fused.checkpoint import loaded_group, loaded_state, moment_dtype, saved_by_param, with_own_steps
from swd_fused.decay_warning import DecayWarning
from swd_fused.schedule import Hyper
from swd_fused.step import BucketStep, take_step

# What belongs to the optimizer as a whole: pickled and copied with it, but in no group and in no state dict.
ATTRIBUTES = (
    "max_grad_norm",
    "schedule",
    "backend",
    "exp_avg_sq_mean",
    "grad_norm",
    "_adamw_weight_decay",
    "_decay_warning",
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
        if isinstance(params, Iterable) and not isinstance(params, Tensor):
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
        params = [params] if isinstance(params, Tensor) else list(params)
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
        if active:
            self._take_step(active)
        return loss

    def _active(self) -> list[tuple[int, Tensor, Tensor]]:
        """Group index, parameter and gradient wherever there is a gradient, all checked before anything changes."""
        active = []
        for index, group in enumerate(self.param_groups):
            check_group(group)
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    if not is_usable(param, grad):
                        raise refused_grad(param, grad)
                    active.append((index, param, grad))
        return active

    def _take_step(self, active: list[tuple[int, Tensor, Tensor]]) -> None:
        buckets, fresh = self._buckets(active)
        self._carried = {bucket.key: bucket.carry(self._carried.get(bucket.key)) for bucket in buckets}
        hyper = Hyper.of(self.param_groups, buckets[0].device)
        steps = [BucketStep(bucket, hyper.to(bucket.device), self._carried[bucket.key]) for bucket in buckets]
        lagged = self.schedule == "lagged" and not fresh
        self.exp_avg_sq_mean, self.grad_norm = take_step(steps, hyper, self.max_grad_norm, lagged, self._before_update)

    def _buckets(self, active: list[tuple[int, Tensor, Tensor]]) -> tuple[list[Bucket], bool]:
        """The step's tensors by backend, device and amsgrad, and whether all of them take their first step."""
        buckets: dict[BucketKey, Bucket] = {}
        fresh = True
        for index, param, grad in active:
            amsgrad = self.param_groups[index]["amsgrad"]
            backend, _ = self._backend_of(param)
            key = backend.name, param.device, amsgrad, param.is_complex()
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = Bucket(key, backend)
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = backend.new_moment(param, moment_dtype(param.dtype), param.device)
            else:
                fresh = False
            if amsgrad and "max_exp_avg_sq" not in state:
                state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
            bucket.add(index, param, grad, state)
        return list(buckets.values()), fresh

    def _before_update(self, exp_avg_sq_mean: Tensor, hyper: Hyper) -> Hyper:
        if self._adamw_weight_decay is not None:
            hyper = hyper.matching_adamw(self._adamw_weight_decay, exp_avg_sq_mean)
            self._adamw_weight_decay = None
            self._set_weight_decay(hyper)
        self._decay_warning.watch(exp_avg_sq_mean, hyper)
        return hyper

    # --- Weight decay, for people who think in AdamW's

    def effective_weight_decay(self) -> list[float]:
        """For each group, the `weight_decay` with which AdamW would shrink the weights as much as this does now.

        At the mean of the last step, NaN before the first. Waits for the device.
        """
        hyper = Hyper.of(self.param_groups, self.exp_avg_sq_mean.device)
        decay = schedule.effective_weight_decay(self.exp_avg_sq_mean, hyper)
        return torch.where(self.exp_avg_sq_mean.isnan(), self.exp_avg_sq_mean, decay).tolist()

    def match_adamw(self, weight_decay: float) -> None:
        """Makes the next step decay as AdamW with this `weight_decay` would; from there on the schedule takes over.

        Sets `weight_decay` in each group that decays at all: at once from the last step's mean, if there is one, and
        exactly in the next step, which knows its own mean and waits for the device this once.
        """
        check_adamw_weight_decay(weight_decay)
        self._adamw_weight_decay = weight_decay
        if not self.exp_avg_sq_mean.isnan():
            hyper = Hyper.of(self.param_groups, self.exp_avg_sq_mean.device)
            self._set_weight_decay(hyper.matching_adamw(weight_decay, self.exp_avg_sq_mean))

    def _set_weight_decay(self, hyper: Hyper) -> None:
        for group, weight_decay in zip(self.param_groups, hyper.weight_decay.tolist(), strict=True):
            group["weight_decay"] = weight_decay

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
        self._carried: dict[BucketKey, Carried] = {}

    def _forget(self) -> None:
        """What only a step can tell."""
        self._carried = {}
        self.exp_avg_sq_mean = torch.tensor(float("nan"))
        self.grad_norm = torch.tensor(float("nan"))
