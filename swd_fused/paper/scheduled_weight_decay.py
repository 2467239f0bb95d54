"""Scheduled weight decay around any torch optimizer, in plain PyTorch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, overload

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

    `ScheduledWeightDecay(torch.optim.Adam(...))` equals `FusedAdamS`, at the cost of more passes over memory. It is
    used like the optimizer that it wraps: learning rate schedulers, `zero_grad`, state dicts. Groups and state are the
    wrapped optimizer's own, and so are methods and attributes that this class lacks, such as `train()` and `eval()`.

    The schedule keeps one number for each tensor, a running average of the gradient's squared norm. An average of
    maxima cannot be had so: with amsgrad the schedule is still that of AdamS, not that of AMSGradS.

    The wrapped optimizer's own decay is taken over: each group's `weight_decay` becomes 0 and `scheduled_weight_decay`
    holds lambda. If some groups decay, those with `weight_decay=0` stay without decay; if none does, all get lambda. A
    group that has a `scheduled_weight_decay` from the start keeps it. A group that is added later gets lambda, unless
    it has `weight_decay=0`.

    Args:
        optimizer: the optimizer to wrap. From now on call the wrapper's `step()`, not the wrapped optimizer's.
        weight_decay: the paper's lambda, as for `FusedAdamS`. None takes each group's own `weight_decay` as its lambda.
        max_decay: no step removes more than this share of a weight. Where it binds a warning says so, once.
    """

    def __init__(self, optimizer: Optimizer, weight_decay: float | None = 5e-4, max_decay: float = 0.1) -> None:
        _check_optimizer(optimizer)
        if weight_decay is not None and not 0 <= weight_decay < math.inf:
            raise ValueError(f"ScheduledWeightDecay got weight_decay={weight_decay!r}, wanted a finite number >= 0.")
        if not 0 < max_decay <= 1:
            raise ValueError(f"ScheduledWeightDecay got max_decay={max_decay!r}, wanted a number in (0, 1].")
        groups = optimizer.param_groups
        _check_decays(groups, weight_decay)
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

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._decay_warning.is_due:
            self._decay_warning.speak(())
        self._share()
        with torch.no_grad():
            self._decay()
        self.optimizer.step()
        return loss

    def _decay(self) -> None:
        """Multiplies weights by their groups' factors, with one call for all of one device and dtype."""
        if not any(map(_with_grad, self.param_groups)):
            return
        self.exp_avg_sq_mean = mean = self._new_mean()
        groups = list(map(_as_fused, self.param_groups))
        factors = decay.decay_factor(mean, GroupValues(groups, "scheduled", decay).on(mean.device).column)
        alike: defaultdict[tuple[int, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for index, group in enumerate(groups):
            for param in map(as_real, _with_grad(group) if group["weight_decay"] != 0 else ()):
                alike[index, param.device, param.dtype].append(param)
        for (index, device, dtype), params in alike.items():
            torch._foreach_mul_(params, to_device(factors[index], device, dtype))
        self._decay_warning.look_at(mean, groups, max(average.step for average in self._averages.values()))

    def _new_mean(self) -> Tensor:
        """Advances the averages of parameters with a gradient, and returns the mean over all their elements."""
        averages: dict[Tensor, Average] = {}
        corrected: list[Tensor] = []
        numel = 0
        for group in self.param_groups:
            beta2 = float(group["betas"][1]) if "betas" in group else BETA2
            for param in _with_grad(group):
                _check_grad(param.grad)
                square = sums_of_squares([as_real(param.grad)], param.device)[0]
                before, step = self._averages.get(param, Average(torch.zeros_like(square), 0))
                before = to_device(before, square.device, square.dtype)
                averages[param] = Average(beta2 * before + (1 - beta2) * square, step + 1)
                corrected.append(averages[param].exp_avg_sq_sum / (1 - beta2 ** (step + 1)))
                numel += as_real(param).numel()
        # Copies to the CPU are waited for, those to a GPU are not.
        home = next((value.device for value in corrected if not value.is_cpu), corrected[0].device)
        self._averages.update(averages)
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
        averages = {
            i: self._averages[param]._asdict() for i, param in enumerate(self._params()) if param in self._averages
        }
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
        averages, lost = {}, []
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                step = state.get("step", group.get("step"))  # some packages count in groups
                moment = next((state[name] for name in SECOND_MOMENTS if name in state), None)
                if moment is not None and step is not None:
                    averages[param] = Average(moment.sum(dtype=scalar_dtype(param.device)), int(step))
                elif any(value is not None for value in state.values()):
                    lost.append(state)
        if lost:
            found = ", ".join(sorted({str(key) for state in lost for key in state}))
            warn_user(
                f"ScheduledWeightDecay got a state dict without its averages, wanted those or, for each parameter, "
                f"{' or '.join(SECOND_MOMENTS)} and step, from which they follow. {len(lost)} of its parameters have "
                f"only {found}: their averages begin anew, so the decay of the next steps follows the newest gradients "
                "alone. Load a state dict that ScheduledWeightDecay.state_dict() has returned, if there is one.",
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


def _check_optimizer(optimizer: object) -> None:
    got = f"ScheduledWeightDecay got {type(optimizer).__name__}, "
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{got}wanted a torch optimizer to wrap, such as torch.optim.Adam(model.parameters()).")
    if hasattr(optimizer, "effective_weight_decay"):
        raise ValueError(f"{got}which schedules its decay already. Use it alone.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{got}which takes many gradients in a step. Wrap an optimizer that takes one.")


def _check_decays(groups: list[dict[str, Any]], given: float | None) -> None:
    """Refuses a lambda that could be meant for each of several decays, and None where no group decays."""
    decays = sorted({_own_decay(group) for group in groups if LAMBDA not in group} - {0.0}, reverse=True)
    if given is not None and len(decays) > 1:
        raise ValueError(
            f"ScheduledWeightDecay got weight_decay={given:g} for groups whose own weight_decay differs: "
            f"{', '.join(f'{own:g}' for own in decays)}. Pass weight_decay=None, which takes each group's own as its "
            "lambda, or set scheduled_weight_decay in these groups."
        )
    if given is None and not decays and not any(group.get(LAMBDA) for group in groups):
        raise ValueError(
            "ScheduledWeightDecay got weight_decay=None, which takes each group's own weight_decay as lambda, but no "
            "group decays. Pass a number, such as 5e-4, or give groups a weight_decay > 0."
        )


def _check_grad(grad: Tensor) -> None:
    if grad.layout is not torch.strided or hasattr(grad, "placements"):
        kind = "one that is sharded over processes" if grad.layout is torch.strided else f"a {grad.layout} one"
        raise RuntimeError(
            f"ScheduledWeightDecay got {kind} as a gradient, wanted a dense tensor that is here as a whole. Use "
            "sparse=False in an embedding, and FusedAdamS for models that are sharded."
        )
