"""The scheduler by itself: scheduled weight decay for any torch optimizer, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from swd_fused import schedule
from swd_fused.step.decay_warning import DecayWarning
from swd_fused.tensors.hyper import Hyper, hyper_row, scalar_dtype

# What optimizers without such a group entry are given: Adam's usual ones.
BETA2 = 0.999
EPS = 1e-8

LAMBDA, MOST = "scheduled_weight_decay", "max_decay"


class Average(NamedTuple):
    """Of one parameter: the running sum of its squared gradients, and over how many steps."""

    exp_avg_sq_sum: Tensor
    step: int


class ScheduledWeightDecay(Optimizer):
    """Gives any torch optimizer a decoupled weight decay that is divided by the model's rms gradient.

    `ScheduledWeightDecay(torch.optim.Adam(...))` equals `FusedAdamS`, at the cost of more passes over memory. It is
    used like the optimizer that it wraps: learning rate schedulers, `zero_grad`, state dicts. Groups and state are the
    wrapped optimizer's own.

    The schedule keeps one number for each tensor, a running average of the gradient's squared norm. An average of
    maxima cannot be had so: with amsgrad the schedule is still that of AdamS, not that of AMSGradS.

    The wrapped optimizer's own decay is taken over: each group's `weight_decay` becomes 0 and `scheduled_weight_decay`
    holds lambda. If some of its groups decay, those with `weight_decay=0` stay without; a group that has a
    `scheduled_weight_decay` from the start keeps that.

    Args:
        optimizer: what to wrap. Step this one from now on, not that.
        weight_decay: the paper's lambda, as for `FusedAdamS`.
        max_decay: no step removes more than this share of a weight. Where it binds a warning says so, once.
    """

    def __init__(self, optimizer: Optimizer, weight_decay: float = 5e-4, max_decay: float = 0.1) -> None:
        _check_optimizer(optimizer)
        _check_number("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "a finite number >= 0")
        _check_number("max_decay", max_decay, 0 < max_decay <= 1, "a number in (0, 1]")
        groups = optimizer.param_groups
        some_decay = any(group.get("weight_decay", 0) > 0 for group in groups)
        for group in groups:
            stays_without = some_decay and group.get("weight_decay", 0) == 0
            _take_over(group, 0.0 if stays_without else weight_decay, max_decay)
        super().__init__(groups, {**optimizer.defaults, LAMBDA: weight_decay, MOST: max_decay})
        self.optimizer = optimizer
        self.exp_avg_sq_mean = torch.tensor(math.nan)
        self._averages: dict[Tensor, Average] = {}
        self._decay_warning = _warning()
        self._share()

    def _share(self) -> None:
        """Loading a state dict replaces the wrapped optimizer's lists: follow it."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not hasattr(self, "optimizer"):  # while the base class is being built the wrapped one has them already
            super().add_param_group(param_group)
            return
        self.optimizer.add_param_group(param_group)
        _take_over(self.optimizer.param_groups[-1], self.defaults[LAMBDA], self.defaults[MOST])
        self._share()

    # --- The step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._decay_warning.warn()
        self._share()
        self._decay()
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def _decay(self) -> None:
        with_grad = [
            (index, param)
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]
        if not with_grad:
            return
        home = with_grad[0][1].device
        averages = {param: self._updated(param, _beta2(self.param_groups[index])) for index, param in with_grad}
        total = sum(
            average.exp_avg_sq_sum.to(home) / (1 - _beta2(self.param_groups[index]) ** average.step)
            for (index, _), average in zip(with_grad, averages.values(), strict=True)
        )
        assert isinstance(total, Tensor)
        count = sum(_elements(param) for _, param in with_grad)
        self._averages.update(averages)
        self.exp_avg_sq_mean = total / max(1, count)
        factors = schedule.decay_factor(self.exp_avg_sq_mean, self._hyper()).unbind()
        for index, param in with_grad:
            if self.param_groups[index][LAMBDA] != 0:
                param.mul_(factors[index].to(param.device, param.dtype.to_real()))
        self._decay_warning.note(self.exp_avg_sq_mean, _schedule_groups(self.param_groups))

    def _updated(self, param: Tensor, beta2: float) -> Average:
        grad = param.grad
        assert grad is not None
        _check_grad(grad)
        dtype = scalar_dtype(param.device)
        if grad.is_complex():
            grad = torch.view_as_real(grad.resolve_conj())
        square = torch.linalg.vector_norm(grad, dtype=dtype).square()
        last = self._averages.get(param)
        if last is None:
            return Average((1 - beta2) * square, 1)
        return Average(beta2 * last.exp_avg_sq_sum + (1 - beta2) * square, last.step + 1)

    def _hyper(self) -> Hyper:
        groups = _schedule_groups(self.param_groups)
        hyper = Hyper([hyper_row(group, "scheduled") for group in groups], self.exp_avg_sq_mean.device)
        for index, group in enumerate(groups):
            if isinstance(group["lr"], Tensor):
                hyper.set_lr(index, group["lr"])
        return hyper

    def effective_weight_decay(self) -> list[float]:
        """For each group, the `weight_decay` with which AdamW would shrink the weights as much as this does now.

        At the mean of the last step, NaN before the first. Waits for the device.
        """
        decay = schedule.effective_weight_decay(self.exp_avg_sq_mean, self._hyper())
        return torch.where(self.exp_avg_sq_mean.isnan(), self.exp_avg_sq_mean, decay).tolist()

    # --- State

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which it can load by itself, and beside it the averages by parameter."""
        self._share()
        params = [param for group in self.param_groups for param in group["params"]]
        averages = {
            index: self._averages[param]._asdict() for index, param in enumerate(params) if param in self._averages
        }
        return {**self.optimizer.state_dict(), "averages": averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this, or of the wrapped kind alone: then the averages follow from `exp_avg_sq`, or begin anew without."""
        own = [{key: group[key] for key in (LAMBDA, MOST)} for group in self.param_groups]
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "averages"})
        self._share()
        for group, values in zip(self.param_groups, own, strict=True):
            _take_over(group, values[LAMBDA], values[MOST])
        params = [param for group in self.param_groups for param in group["params"]]
        if "averages" in state_dict:
            self._averages = {
                params[index]: Average(saved["exp_avg_sq_sum"].to(params[index].device, copy=True), saved["step"])
                for index, saved in state_dict["averages"].items()
            }
        else:
            self._averages = {
                param: Average(state["exp_avg_sq"].sum(dtype=scalar_dtype(param.device)), int(state["step"]))
                for param, state in self.state.items()
                if "exp_avg_sq" in state and "step" in state
            }
        self.exp_avg_sq_mean = torch.tensor(math.nan)

    def __getstate__(self) -> dict[str, Any]:
        names = ("optimizer", "exp_avg_sq_mean", "_averages")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._decay_warning = _warning()

    def __repr__(self) -> str:
        return f"ScheduledWeightDecay of {self.optimizer!r}"


def _take_over(group: dict[str, Any], weight_decay: float, max_decay: float) -> None:
    group.setdefault(LAMBDA, weight_decay)
    group.setdefault(MOST, max_decay)
    if "weight_decay" in group:
        group["weight_decay"] = 0.0


def _beta2(group: dict[str, Any]) -> float:
    return float(group["betas"][1]) if "betas" in group else BETA2


def _eps(group: dict[str, Any]) -> float:
    """Adafactor has two in one entry, neither of which is Adam's."""
    eps = group.get("eps")
    return float(eps) if isinstance(eps, Real) else EPS


def _schedule_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as FusedAdamS would have them, for the schedule that both share."""
    return [
        {
            "lr": group["lr"],
            "betas": (0.0, _beta2(group)),
            "eps": _eps(group),
            "weight_decay": group[LAMBDA],
            "max_decay": group[MOST],
            "maximize": False,
        }
        for group in groups
    ]


def _elements(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


def _warning() -> DecayWarning:
    return DecayWarning(
        "Scheduled weight decay is divided by the rms gradient, so values made for AdamW are far too large: multiply "
        "them by the rms gradient, optimizer.exp_avg_sq_mean.sqrt()."
    )


def _check_optimizer(optimizer: object) -> None:
    from swd_fused.optimizer import FusedAdamS

    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"ScheduledWeightDecay got {type(optimizer).__name__}, wanted a torch optimizer to wrap, such as "
            "torch.optim.Adam(model.parameters())."
        )
    if isinstance(optimizer, (FusedAdamS, ScheduledWeightDecay)):
        raise ValueError(
            f"ScheduledWeightDecay got {type(optimizer).__name__}, which schedules its decay already. Use it alone."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "ScheduledWeightDecay got LBFGS, wanted an optimizer that takes one step for one gradient. LBFGS evaluates "
            "many within a step and would have its own weights changed in between."
        )


def _check_number(name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"ScheduledWeightDecay got {name}={value!r}, wanted {wanted}.")


def _check_grad(grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"ScheduledWeightDecay got a {grad.layout} gradient, wanted a dense one. Use sparse=False in the embedding."
        )
    if hasattr(grad, "placements"):
        raise RuntimeError(
            "ScheduledWeightDecay got a gradient that is sharded over several processes, wanted a whole one: the mean "
            "would be that of the shard."
        )
