"""The scheduler by itself: scheduled weight decay for any torch optimizer, in plain PyTorch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from swd_fused import decay
from swd_fused.backends import sums_of_squares
from swd_fused.decay.warning import DecayWarning
from swd_fused.devices.transfer import from_host, is_fake, scalar_dtype, to_device
from swd_fused.paper.wrapped_groups import (
    DECOUPLED,
    LAMBDA,
    MOST,
    Lambdas,
    beta2_of,
    decaying,
    lambdas_of,
    own_decay,
    schedule_groups,
    take_over,
)
from swd_fused.user_warning import warn_user

# What optimizers call the running average of squared gradients, without bias correction: Adam, and the Ranger family.
SECOND_MOMENTS = ("exp_avg_sq", "variance_ma")

# Whose fused kernel decays weights as it updates them, by their groups' `weight_decay` and `decoupled_weight_decay`.
DECAYS_IN_ITS_KERNEL = (torch.optim.Adam, torch.optim.AdamW)


class Average(NamedTuple):
    """Of one parameter: the running sum of its squared gradients, and over how many steps."""

    exp_avg_sq_sum: Tensor
    step: int


class ScheduledWeightDecay(Optimizer):
    """Gives any torch optimizer a decoupled weight decay that is divided by the model's rms gradient.

    `ScheduledWeightDecay(torch.optim.Adam(...))` equals `FusedAdamS`, at the cost of more passes over memory. It is
    used like the optimizer that it wraps: learning rate schedulers, `zero_grad`, state dicts. Groups and state are the
    wrapped optimizer's own, and so are methods and attributes that this class lacks, such as `train()` and `eval()`.

    The schedule keeps one number for each tensor, a running average of the gradient's squared norm. An average of
    maxima cannot be had so: with amsgrad the schedule is still that of AdamS, not that of AMSGradS.

    The wrapped optimizer's own decay is taken over: each group's `weight_decay` becomes 0 and `scheduled_weight_decay`
    holds lambda. If no group decays, all get lambda. Else those with the largest `weight_decay` get it, those with
    `weight_decay=0` stay without, and those in between keep their ratio to the largest; a warning says so where there
    are some. A group that has a `scheduled_weight_decay` from the start keeps that.

    Args:
        optimizer: what to wrap. Step this one from now on, not that.
        weight_decay: the paper's lambda, as for `FusedAdamS`. None takes each group's own `weight_decay` as its lambda.
        max_decay: no step removes more than this share of a weight. Where it binds a warning says so, once.
    """

    def __init__(self, optimizer: Optimizer, weight_decay: float | None = 5e-4, max_decay: float = 0.1) -> None:
        _check_optimizer(optimizer)
        if weight_decay is not None:
            _check_number("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "a finite number >= 0, or None")
        _check_number("max_decay", max_decay, 0 < max_decay <= 1, "a number in (0, 1]")
        groups = optimizer.param_groups
        self._lambdas = lambdas_of(groups, weight_decay)
        some_decay = any(own_decay(group) > 0 for group in groups)
        for group in groups:
            stays_without = some_decay and own_decay(group) == 0
            take_over(group, 0.0 if stays_without else self._lambdas.of(own_decay(group)), max_decay)
        super().__init__(groups, {**optimizer.defaults, LAMBDA: weight_decay, MOST: max_decay})
        self.optimizer = optimizer
        self.exp_avg_sq_mean = torch.tensor(math.nan)
        self._averages: dict[Tensor, Average] = {}
        self._decay_warning = _warning()
        self._share()

    def __getattr__(self, name: str) -> Any:
        """Passes on what only the wrapped optimizer has, but for private names: by one of these GradScaler would take
        this for a fused optimizer, which unscales gradients by itself."""
        optimizer = self.__dict__.get("optimizer")  # not there yet while a copy or a pickle is being made
        if optimizer is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(optimizer, name)

    def _share(self) -> None:
        """Loading a state dict replaces the wrapped optimizer's lists: follow it."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer. Its lambda follows from its `weight_decay` as those of the others."""
        if "optimizer" not in self.__dict__:  # while the base class is being built the wrapped one has them already
            super().add_param_group(param_group)
            return
        stays_without = param_group.get("weight_decay") == 0
        self.optimizer.add_param_group(param_group)
        group = self.optimizer.param_groups[-1]
        take_over(group, 0.0 if stays_without else self._lambdas.of(own_decay(group)), self.defaults[MOST])
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
        with decaying(self._decay()):
            self.optimizer.step()
        return loss

    @torch.no_grad()
    def _decay(self) -> list[tuple[dict[str, Any], float]]:
        """Decays weights, but for groups that it returns with the `weight_decay` by which the wrapped optimizer has to
        decay them in its step."""
        with_grad = [[param for param in group["params"] if param.grad is not None] for group in self.param_groups]
        if not any(with_grad):
            return []
        self.exp_avg_sq_mean = mean = self._new_mean(with_grad)
        left = self._groups_left_to_it(with_grad)
        factors = decay.decay_factor(mean, self._columns().__getitem__).unbind()
        for index, params in enumerate(with_grad):
            if self.param_groups[index][LAMBDA] != 0 and index not in left:
                _multiply(params, factors[index])
        groups = schedule_groups(self.param_groups)
        self._decay_warning.look_at(mean, groups, max(average.step for average in self._averages.values()))
        if not left:
            return []
        decays = self.effective_weight_decay()
        # With lr=0 it may be infinite, and times 0 that is NaN.
        return [(self.param_groups[index], decays[index] if groups[index]["lr"] > 0 else 0.0) for index in left]

    def _groups_left_to_it(self, with_grad: list[list[Tensor]]) -> list[int]:
        """Returns the groups that torch's fused Adam can decay as it updates them: that saves reading and writing all
        parameters once more, 3 of 17 ms for 16M elements. On a GPU the decay is not known here without waiting."""
        if type(self.optimizer) not in DECAYS_IN_ITS_KERNEL or is_fake(self.exp_avg_sq_mean):
            return []
        return [
            index
            for index, (group, params) in enumerate(zip(self.param_groups, with_grad, strict=True))
            if group[LAMBDA] != 0
            and group.get("fused")
            and group.get(DECOUPLED) is not None
            and group["weight_decay"] == 0  # else somebody has set it since, and it is obeyed
            and self.exp_avg_sq_mean.is_cpu
            and all(param.is_cpu for param in params)
        ]

    def _new_mean(self, with_grad: list[list[Tensor]]) -> Tensor:
        """Advances the averages of parameters with a gradient, and returns the mean over all their elements."""
        by_device: defaultdict[torch.device, list[tuple[Tensor, float]]] = defaultdict(list)
        for group, params in zip(self.param_groups, with_grad, strict=True):
            beta2 = beta2_of(group)
            for param in params:
                _check_grad(param.grad)
                by_device[param.device].append((param, beta2))
        averages: dict[Tensor, Average] = {}
        totals = []
        for device, members in by_device.items():
            last = [self._averages.get(param) for param, _ in members]
            steps = [1 if average is None else average.step + 1 for average in last]
            rows = [(beta2, 1 - beta2**step) for (_, beta2), step in zip(members, steps, strict=True)]
            table = torch.tensor(rows, dtype=scalar_dtype(device), device="cpu")
            beta2s, corrections = from_host(table, device).unbind(1)
            squares = _squared_norms([grad for param, _ in members if (grad := param.grad) is not None], device)
            sums_before = [squares.new_zeros(()) if average is None else average.exp_avg_sq_sum for average in last]
            before = torch.stack([to_device(total, device, squares.dtype) for total in sums_before])
            sums = beta2s * before + (1 - beta2s) * squares
            totals.append((sums / corrections).sum())
            for (param, _), total, step in zip(members, sums.unbind(), steps, strict=True):
                averages[param] = Average(total, step)
        # Copies to the CPU are waited for, those to a GPU are not.
        home = next((total.device for total in totals if not total.is_cpu), totals[0].device)
        total = torch.stack([to_device(total, home, scalar_dtype(home)) for total in totals]).sum()
        self._averages.update(averages)
        return total / max(1, sum(_elements(param) for params in with_grad for param in params))

    def _columns(self) -> dict[str, Tensor]:
        """Returns what `decay.decay_factor` is to know of the groups, on the mean's device."""
        device, groups = self.exp_avg_sq_mean.device, schedule_groups(self.param_groups)
        lrs = [group["lr"] for group in groups]
        numbers = [-1.0 if isinstance(lr, Tensor) else max(0.0, lr) for lr in lrs]
        rows = [{**decay.columns(group, lr), "eps": group["eps"]} for group, lr in zip(groups, numbers, strict=True)]
        table = torch.tensor([list(row.values()) for row in rows], dtype=scalar_dtype(device), device="cpu")
        columns = dict(zip(rows[0], from_host(table, device).unbind(1), strict=True))
        for index, lr in enumerate(lrs):
            if isinstance(lr, Tensor):
                columns["decay_lr"][index] = to_device(lr.detach().reshape(()), device).clamp(min=0)
        return columns

    def effective_weight_decay(self) -> list[float]:
        """For each group, the `weight_decay` with which AdamW would shrink the weights as much as this does now.

        At the mean of the last step, NaN before the first. Waits for the device.
        """
        mean, groups = float(self.exp_avg_sq_mean), schedule_groups(self.param_groups)
        return [decay.effective_decay(group, mean, max(0.0, float(group["lr"]))) for group in groups]

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
        """Of this, or of the wrapped kind alone: then the averages follow from its second moments, `exp_avg_sq` or
        `variance_ma`. Without these they begin anew, and a warning says so."""
        own = [{key: group[key] for key in (LAMBDA, MOST)} for group in self.param_groups]
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "averages"})
        self._share()
        for group, values in zip(self.param_groups, own, strict=True):
            take_over(group, values[LAMBDA], values[MOST])
        params = [param for group in self.param_groups for param in group["params"]]
        if "averages" in state_dict:
            self._averages = {
                params[index]: Average(saved["exp_avg_sq_sum"].to(params[index].device, copy=True), saved["step"])
                for index, saved in state_dict["averages"].items()
            }
        else:
            self._averages = self._averages_of_moments()
        self.exp_avg_sq_mean = torch.tensor(math.nan)

    def _averages_of_moments(self) -> dict[Tensor, Average]:
        """Returns what Adam's second moments say, and warns of parameters that have taken steps without any."""
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

    def __getstate__(self) -> dict[str, Any]:
        names = ("optimizer", "exp_avg_sq_mean", "_averages", "_lambdas")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_lambdas", Lambdas(self.defaults[LAMBDA], 0.0))  # pickles of 0.1.0 have none
        self._decay_warning = _warning()

    def __repr__(self) -> str:
        return f"ScheduledWeightDecay of {self.optimizer!r}"


def _squared_norms(grads: list[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of each gradient's squared elements. Waits for no device."""
    grads = [torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad for grad in grads]
    if all(type(grad) is Tensor for grad in grads):
        return sums_of_squares(grads, device)
    return torch.stack([torch.linalg.vector_norm(grad, dtype=scalar_dtype(device)) for grad in grads]).square()


def _multiply(params: list[Tensor], factor: Tensor) -> None:
    """Multiplies parameters in place, all of one device and dtype by one call."""
    alike: defaultdict[tuple[torch.device, torch.dtype, type], list[Tensor]] = defaultdict(list)
    for param in params:
        real = torch.view_as_real(param) if param.is_complex() else param
        alike[param.device, real.dtype, type(param)].append(real)
    for (device, dtype, kind), tensors in alike.items():
        scale = to_device(factor, device, dtype)
        if kind in (Tensor, torch.nn.Parameter):
            torch._foreach_mul_(tensors, scale)
        else:
            for tensor in tensors:  # other kinds know only the usual operations
                tensor.mul_(scale)


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


def _check_grad(grad: Tensor | None) -> None:
    assert grad is not None
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"ScheduledWeightDecay got a {grad.layout} gradient, wanted a dense one. Use sparse=False in the embedding."
        )
    if hasattr(grad, "placements"):
        raise RuntimeError(
            "ScheduledWeightDecay got a gradient that is sharded over several processes, wanted a whole one: the mean "
            "would be that of the shard."
        )
