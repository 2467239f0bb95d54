"""Scheduled weight decay around any torch optimizer, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from swd_fused import decay, metrics
from swd_fused.backends import sums_of_squares
from swd_fused.core.values import GroupValues
from swd_fused.decay.warning import DecayWarning
from swd_fused.devices.transfer import scalar_dtype, to_device
from swd_fused.options import GROUP_DEFAULTS
from swd_fused.state.operands import as_real
from swd_fused.user_warning import warn_user

LAMBDA, MOST = "scheduled_weight_decay", "max_decay"  # entries of groups

# Names of the running average of squared gradients, without bias correction: in Adam, and in the Ranger family.
SECOND_MOMENTS = ("exp_avg_sq", "variance_ma")

# Adam's usual values, for optimizers that have no such entry in their groups.
BETA2, EPS = 0.999, 1e-8

ADVICE = (
    "Scheduled weight decay is divided by the rms gradient, so values made for AdamW are far too large: multiply "
    "them by the rms gradient, optimizer.exp_avg_sq_mean.sqrt()."
)


class Average(NamedTuple):
    """One parameter's running sum of squared gradients, and the number of its steps."""

    exp_avg_sq_sum: Tensor
    step: int


class Lambdas(NamedTuple):
    """Only pickles of 0.2 contain it."""

    given: float | None
    largest: float


class ScheduledWeightDecay(Optimizer):
    """Gives any torch optimizer a decoupled weight decay that is divided by the model's rms gradient.

    `ScheduledWeightDecay(torch.optim.Adam(...))` equals `FusedAdamS`, at the cost of more passes over memory. It shares
    groups and state with the optimizer that it wraps, and passes on methods that it lacks, such as `train()`. It keeps
    one number for each tensor, a running average of the gradient's squared norm. So with amsgrad the schedule is that
    of AdamS, not that of AMSGradS, which averages maxima.

    Each group's `weight_decay` becomes 0, and its `scheduled_weight_decay` is lambda. If some groups decay, those with
    `weight_decay=0` stay without decay, and so do such groups that are added later; if none does, all get lambda. A
    group that has a `scheduled_weight_decay` from the start keeps it.

    Args:
        optimizer: the optimizer to wrap. From now on call the wrapper's `step()`, not the wrapped optimizer's.
        weight_decay: the paper's lambda, as for `FusedAdamS`. None takes each group's own `weight_decay` as its lambda.
        max_decay: no step removes more than this share of a weight. Where it binds a warning says so, once.
    """

    def __init__(self, optimizer: Optimizer, weight_decay: float | None = 5e-4, max_decay: float = 0.1) -> None:
        _check(optimizer, weight_decay, max_decay)
        groups = optimizer.param_groups
        some_decay = any(map(_own_decay, groups))
        for group in groups:
            own = _own_decay(group)
            _take_over(group, own if weight_decay is None or (some_decay and own == 0) else weight_decay, max_decay)
        super().__init__(groups, {**optimizer.defaults, LAMBDA: weight_decay, MOST: max_decay})
        self.optimizer = optimizer
        self.exp_avg_sq_mean = torch.tensor(math.nan)
        self._averages: dict[Tensor, Average] = {}
        self._decay_warning = DecayWarning(ADVICE)
        self._share()

    def __getattr__(self, name: str) -> Any:
        """Passes on what only the wrapped optimizer has, but for private names: by one of these GradScaler would take
        this for a fused optimizer, which unscales gradients by itself."""
        optimizer = self.__dict__.get("optimizer")  # not there yet while a copy or a pickle is being made
        if optimizer is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(optimizer, name)

    def _share(self) -> None:
        """Refers to the wrapped optimizer's groups and state, which are other objects after it has loaded."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optimizer" not in self.__dict__:  # while the base class is being built the wrapped one has them already
            super().add_param_group(param_group)
            return
        given = 0.0 if param_group.get("weight_decay") == 0 else self.defaults[LAMBDA]
        self.optimizer.add_param_group(param_group)
        group = self.optimizer.param_groups[-1]
        _take_over(group, _own_decay(group) if given is None else given, self.defaults[MOST])
        self._share()

    # --- The step

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._decay_warning.is_due:
            self._decay_warning.speak(())
        self._share()
        if any(map(_with_grad, self.param_groups)):
            with torch.no_grad():
                self._decay()
        self.optimizer.step()
        return loss

    def _decay(self) -> None:
        """Multiplies weights by their groups' factors."""
        self.exp_avg_sq_mean = mean = self._new_mean()
        groups = list(map(_as_fused, self.param_groups))
        factors = decay.decay_factor(mean, GroupValues(groups, "scheduled", decay).on(mean.device).column)
        for group, factor in zip(groups, factors.unbind(), strict=True):
            for param in map(as_real, _with_grad(group) if group["weight_decay"] != 0 else ()):
                param.mul_(to_device(factor, param.device, param.dtype))
        self._decay_warning.look_at(mean, groups, max(average.step for average in self._averages.values()))

    def _new_mean(self) -> Tensor:
        """Advances the averages of parameters with a gradient, and returns the mean over all their elements."""
        averages: dict[Tensor, Average] = {}
        corrected: list[Tensor] = []
        for group in self.param_groups:
            beta2 = float(group["betas"][1]) if "betas" in group else BETA2
            for param in _with_grad(group):
                _check_grad(param.grad)
                square = sums_of_squares([as_real(param.grad)], param.device)[0]
                before, step = self._averages.get(param, Average(torch.zeros_like(square), 0))
                before = to_device(before, square.device, square.dtype)
                averages[param] = Average(beta2 * before + (1 - beta2) * square, step + 1)
                corrected.append(averages[param].exp_avg_sq_sum / (1 - beta2 ** (step + 1)))
        self._averages.update(averages)
        # Copies to the CPU are waited for, those to a GPU are not.
        home = next((value.device for value in corrected if not value.is_cpu), corrected[0].device)
        numel = sum(as_real(param).numel() for param in averages)
        return torch.stack([to_device(value, home, scalar_dtype(home)) for value in corrected]).sum() / max(1, numel)

    def effective_weight_decay(self) -> list[float]:
        """Returns for each group the `weight_decay` with which AdamW would shrink the weights as much as this does now.

        At the mean of the last step, NaN before the first. Waits for the device.
        """
        return metrics.effective_weight_decay(list(map(_as_fused, self.param_groups)), self.exp_avg_sq_mean)

    # --- State

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict, which it can load by itself, with the averages beside it."""
        self._share()
        numbered = enumerate(self._params())
        averages = {i: self._averages[param]._asdict() for i, param in numbered if param in self._averages}
        return {**self.optimizer.state_dict(), "averages": averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or one of the wrapped optimizer's.

        From the latter the averages follow by its second moments, `exp_avg_sq` or `variance_ma`. Without these they
        begin anew, and a warning says so.
        """
        own = [(group[LAMBDA], group[MOST]) for group in self.param_groups]
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "averages"})
        self._share()
        for group, values in zip(self.param_groups, own, strict=True):
            _take_over(group, *values)
        if "averages" in state_dict:
            params = self._params()
            self._averages = {
                params[index]: Average(saved["exp_avg_sq_sum"].to(params[index].device, copy=True), saved["step"])
                for index, saved in state_dict["averages"].items()
            }
        else:
            self._averages = self._averages_of_moments()
        self.exp_avg_sq_mean = torch.tensor(math.nan)

    def _averages_of_moments(self) -> dict[Tensor, Average]:
        """Returns the averages that follow from second moments. Warns of parameters that have stepped without any."""
        averages, lost = {}, 0
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                step = state.get("step", group.get("step"))  # some packages count in groups
                moment = next((state[name] for name in SECOND_MOMENTS if name in state), None)
                if moment is not None and step is not None:
                    averages[param] = Average(moment.sum(dtype=scalar_dtype(param.device)), int(step))
                elif any(value is not None for value in state.values()):
                    lost += 1
        if lost:
            warn_user(
                f"ScheduledWeightDecay got a state dict without its averages or, for {lost} parameters, "
                f"{' or '.join(SECOND_MOMENTS)} and step, from which they follow. They begin anew, so the next steps "
                "decay by the newest gradients alone. Load what ScheduledWeightDecay.state_dict() returned, if you can."
            )
        return averages

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        names = ("optimizer", "exp_avg_sq_mean", "_averages")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._decay_warning = DecayWarning(ADVICE)

    def __repr__(self) -> str:
        return f"ScheduledWeightDecay of {self.optimizer!r}"


# --- Groups of the wrapped optimizer


def _own_decay(group: dict[str, Any]) -> float:
    return float(group.get("weight_decay") or 0.0)


def _take_over(group: dict[str, Any], weight_decay: float, max_decay: float) -> None:
    group.setdefault(LAMBDA, weight_decay)
    group.setdefault(MOST, max_decay)
    if "weight_decay" in group:
        group["weight_decay"] = 0.0


def _with_grad(group: dict[str, Any]) -> list[Any]:
    return [param for param in group["params"] if param.grad is not None]


def _as_fused(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group as FusedAdamS would have it, for the schedule that both share."""
    eps = group.get("eps")  # Adafactor has two in one entry, neither of which is Adam's
    own = {"eps": float(eps) if isinstance(eps, Real) else EPS, "weight_decay": group[LAMBDA]}
    return {**GROUP_DEFAULTS, **{name: group[name] for name in ("params", "lr", MOST)}, **own}


# --- Checks


def _check(optimizer: Optimizer, weight_decay: float | None, max_decay: float) -> None:
    """Refuses arguments that are out of range, and groups that do not tell which lambda is meant."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"ScheduledWeightDecay got {type(optimizer).__name__}, wanted a torch optimizer to wrap that takes one "
            "gradient in a step, such as torch.optim.Adam(model.parameters())."
        )
    if not (weight_decay is None or 0 <= weight_decay < math.inf) or not 0 < max_decay <= 1:
        raise ValueError(
            f"ScheduledWeightDecay got weight_decay={weight_decay!r} and max_decay={max_decay!r}, wanted a finite "
            "number >= 0 or None, and a number in (0, 1]."
        )
    groups = optimizer.param_groups
    decays = {_own_decay(group) for group in groups if LAMBDA not in group} - {0.0}
    if weight_decay is not None and len(decays) > 1:
        raise ValueError(
            f"ScheduledWeightDecay got weight_decay={weight_decay:g} for groups whose own weight_decay differs: "
            f"{sorted(decays)}. Pass weight_decay=None, which takes each group's own as its lambda, or set "
            "scheduled_weight_decay in these groups."
        )
    if weight_decay is None and not decays and not any(group.get(LAMBDA) for group in groups):
        raise ValueError(
            "ScheduledWeightDecay got weight_decay=None, which takes each group's own weight_decay as lambda, but no "
            "group decays. Pass a number, such as 5e-4, or give groups a weight_decay > 0."
        )


def _check_grad(grad: Tensor) -> None:
    if grad.layout is not torch.strided or hasattr(grad, "placements"):
        raise RuntimeError(
            "ScheduledWeightDecay got a gradient that is sparse or sharded, wanted a dense tensor that is here as a "
            "whole. Use sparse=False in an embedding, and FusedAdamS for models that are sharded."
        )
