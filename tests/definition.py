"""The paper's AdamS (algorithm 2, and AMSGradS) in NumPy, as DESIGN fixes it: the judge of every backend. Beside it the
other decays of weights: AdamW's, AdamC's (arXiv 2506.02285), the one independent of the learning rate (as in arXiv
2309.14322), and the cautious one (arXiv 2510.12402). And the exponential average of the weights.

In long double, which is more precise than anything that it judges. Nothing of the package is used here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray


def wide(values: Array | float) -> Array:
    return np.array(values, dtype=np.longdouble)


@dataclass
class Group:
    params: list[int]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 5e-4
    amsgrad: bool = False
    maximize: bool = False
    max_decay: float = 0.1
    corrected_decay: bool = False
    cautious_decay: bool = False
    largest_lr: float | None = None
    largest_lr_so_far: float = 0.0
    ema_decay: float | None = None
    ema_warmup: bool = False
    bias_correction: bool = True


@dataclass
class AdamS:
    """`step` takes a gradient or None for each parameter. Methods in the middle are there to be got wrong."""

    params: list[Array]
    groups: list[Group]
    max_grad_norm: float | None = None
    decay: str = "scheduled"
    exp_avg: list[Array] = field(init=False)
    exp_avg_sq: list[Array] = field(init=False)
    max_exp_avg_sq: list[Array] = field(init=False)
    steps: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.params = [wide(p) for p in self.params]
        self.exp_avg = [np.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [np.zeros_like(p) for p in self.params]
        self.max_exp_avg_sq = [np.zeros_like(p) for p in self.params]
        self.ema_param = [p.copy() for p in self.params]
        self.steps = [0] * len(self.params)
        self.exp_avg_sq_mean = wide(np.nan)
        self.grad_norm = wide(np.nan)

    def step(self, grads: list[Array | None]) -> None:
        with_grad = [(group, i) for group in self.groups for i in group.params if grads[i] is not None]
        if not with_grad:
            return
        for group in self.groups:
            group.largest_lr_so_far = max(group.largest_lr_so_far, group.lr)
        g = {i: wide(grads[i]) for _, i in with_grad}
        self.grad_norm = np.sqrt(sum((x * x).sum() for x in g.values()))
        if self.max_grad_norm is not None:
            clip = min(wide(1.0), self.max_grad_norm / (self.grad_norm + wide(1e-6)))
            g = {i: x * clip for i, x in g.items()}
        for group, i in with_grad:
            beta1, beta2 = group.betas
            x = -g[i] if group.maximize else g[i]
            self.steps[i] += 1
            self.exp_avg[i] = beta1 * self.exp_avg[i] + (1 - beta1) * x
            self.exp_avg_sq[i] = beta2 * self.exp_avg_sq[i] + (1 - beta2) * x * x
            self.max_exp_avg_sq[i] = np.maximum(self.max_exp_avg_sq[i], self.exp_avg_sq[i])
        self.exp_avg_sq_mean = self.mean(with_grad)
        for group, i in with_grad:
            exp_avg_hat = self.exp_avg[i] / self.bias_correction(group, 0, i)
            direction = exp_avg_hat / (np.sqrt(self.exp_avg_sq_hat(group, i)) + group.eps)
            shrink = self.shrink(group, self.mean_for(i, with_grad))
            decays = self.agrees(i, direction, g[i]) if group.cautious_decay else np.ones_like(direction, dtype=bool)
            decay_factor = np.where(decays, 1 - wide(shrink), wide(1.0))
            before = self.params[i]
            self.params[i] = decay_factor * before - group.lr * direction
            if group.ema_decay is not None:
                self.ema_param[i] = self.average(self.ema_decay(group, i), i, before)

    def shrink(self, group: Group, mean: Array) -> Array:
        """What a step takes of each weight that decays."""
        if self.decay == "independent":
            return wide(group.weight_decay) * self.correction(group)
        lr = wide(group.lr) * (self.correction(group) if group.corrected_decay else 1)
        if self.decay == "decoupled":
            return lr * group.weight_decay
        return (
            min(lr * group.weight_decay / (np.sqrt(mean) + group.eps), wide(group.max_decay)) if mean > 0 else wide(0)
        )

    def ema_decay(self, group: Group, i: int) -> Array:
        t = self.steps[i]
        assert group.ema_decay is not None
        return wide(min(group.ema_decay, (1 + t) / wide(10 + t)) if group.ema_warmup else group.ema_decay)

    def average(self, decay: Array, i: int, before: Array) -> Array:
        return self.ema_param[i] + (1 - decay) * (self.params[i] - self.ema_param[i])

    def correction(self, group: Group) -> Array:
        largest = max(group.largest_lr_so_far, group.largest_lr or 0.0)
        return wide(group.lr) / largest if group.lr > 0 else wide(0.0)

    def agrees(self, i: int, direction: Array, grad: Array) -> Array:
        """Which elements the update does not move away from zero."""
        return direction * self.params[i] >= 0

    def bias_correction(self, group: Group, moment: int, i: int) -> Array:
        return 1 - wide(group.betas[moment]) ** self.steps[i] if group.bias_correction else wide(1.0)

    def exp_avg_sq_hat(self, group: Group, i: int) -> Array:
        second = self.max_exp_avg_sq[i] if group.amsgrad else self.exp_avg_sq[i]
        return second / self.bias_correction(group, 1, i)

    def mean(self, with_grad: list[tuple[Group, int]]) -> Array:
        count = sum(self.params[i].size for _, i in with_grad)
        return sum(self.exp_avg_sq_hat(group, i).sum() for group, i in with_grad) / max(count, 1)

    def mean_for(self, i: int, with_grad: list[tuple[Group, int]]) -> Array:
        return self.exp_avg_sq_mean


def wrong(name: str, **methods: Any) -> type[AdamS]:
    """Returns the definition with a mistake."""
    return type(name, (AdamS,), methods)


def _mean_of_decaying(self: AdamS, with_grad: list[tuple[Group, int]]) -> Array:
    return AdamS.mean(self, [(group, i) for group, i in with_grad if group.weight_decay > 0])


def _mean_of_group(self: AdamS, i: int, with_grad: list[tuple[Group, int]]) -> Array:
    own = next(group for group, j in with_grad if j == i)
    return self.mean([(group, j) for group, j in with_grad if group is own])


# Each tensor or each group has a schedule of its own; groups without decay are left out of the mean; the second moment
# is taken as it is stored.
MeanPerTensor = wrong("MeanPerTensor", mean_for=lambda self, i, every: self.mean([(g, j) for g, j in every if j == i]))
MeanPerGroup = wrong("MeanPerGroup", mean_for=_mean_of_group)
MeanOfDecayingOnly = wrong("MeanOfDecayingOnly", mean=_mean_of_decaying)
NoBiasCorrection = wrong(
    "NoBiasCorrection",
    exp_avg_sq_hat=lambda self, group, i: (self.max_exp_avg_sq if group.amsgrad else self.exp_avg_sq)[i],
)


class MeanOfStepBefore(AdamS):
    """The lagged schedule: the mean of v^ as it stands before the step, over all parameters that have taken a step.

    Wrong for "exact": the decay is taken before this step's schedule is known, as in swapped passes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.before: Array | None = None

    def step(self, grads: list[Array | None]) -> None:
        stepped = [(group, i) for group in self.groups for i in group.params if self.steps[i] > 0]
        self.before = self.mean(stepped) if stepped else None
        super().step(grads)
        if self.before is not None:
            self.exp_avg_sq_mean = self.before

    def mean_for(self, i: int, with_grad: list[tuple[Group, int]]) -> Array:
        return self.exp_avg_sq_mean if self.before is None else self.before


class MeanNotClipped(AdamS):
    """Wrong with clipping: the schedule sees gradients as they were before."""

    def mean(self, with_grad: list[tuple[Group, int]]) -> Array:
        mean = super().mean(with_grad)
        clip = min(wide(1.0), self.max_grad_norm / self.grad_norm) if self.max_grad_norm else wide(1.0)
        return mean / clip**2


WRONG = [MeanPerTensor, MeanPerGroup, MeanOfDecayingOnly, NoBiasCorrection, MeanOfStepBefore, MeanNotClipped]
