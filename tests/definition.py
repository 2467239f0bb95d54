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
    """`step` takes a gradient or None for each parameter. Methods in the middle are there to be got wrong.

    Lagged: the mean of v^ is over all elements of all parameters that have taken a step, as the state stands at the
    beginning of a step, whether or not they have a gradient now. As long as no element has taken one, exact.
    """

    params: list[Array]
    groups: list[Group]
    max_grad_norm: float | None = None
    decay: str = "scheduled"
    lagged: bool = False
    exp_avg: list[Array] = field(init=False)
    exp_avg_sq: list[Array] = field(init=False)
    max_exp_avg_sq: list[Array] = field(init=False)
    steps: list[int] = field(init=False)
    grad_size: dict[int, Array] = field(init=False)  # of the terms that a gradient is a sum of

    def __post_init__(self) -> None:
        self.params = [wide(p) for p in self.params]
        self.exp_avg = [np.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [np.zeros_like(p) for p in self.params]
        self.max_exp_avg_sq = [np.zeros_like(p) for p in self.params]
        self.ema_param = [p.copy() for p in self.params]
        self.steps, self.grad_size = [0] * len(self.params), {}
        self.exp_avg_sq_mean = wide(np.nan)
        self.grad_norm = wide(np.nan)

    def step(self, grads: list[Array | None]) -> None:
        with_grad = [(group, i) for group in self.groups for i in group.params if grads[i] is not None]
        if not with_grad:
            return
        for group in self.groups:
            group.largest_lr_so_far = max(group.largest_lr_so_far, group.lr)
        g = {i: wide(grads[i]) for _, i in with_grad}
        self.grad_norm, clip = self.norm(grads), self.clip_factor(grads)
        stepped = [(group, i) for group in self.groups for i in group.params if self.steps[i] > 0]
        is_known = self.lagged and any(self.params[i].size for _, i in stepped)
        last_mean = self.mean(stepped) if is_known else None
        for group, i in with_grad:
            beta1, beta2 = group.betas
            x = -clip * g[i] if group.maximize else clip * g[i]
            l2 = group.weight_decay * self.params[i] if self.decay == "l2" else 0
            self.grad_size[i] = abs(x) + abs(l2)
            x = x + l2
            self.steps[i] += 1
            self.exp_avg[i] = beta1 * self.exp_avg[i] + (1 - beta1) * x
            self.exp_avg_sq[i] = beta2 * self.exp_avg_sq[i] + (1 - beta2) * x * x
            self.max_exp_avg_sq[i] = np.maximum(self.max_exp_avg_sq[i], self.exp_avg_sq[i])
        self.exp_avg_sq_mean = self.mean(with_grad) if last_mean is None else last_mean
        for group, i in with_grad:
            exp_avg_hat = self.exp_avg[i] / self.bias_correction(group, 0, i)
            direction = exp_avg_hat / (np.sqrt(self.exp_avg_sq_hat(group, i)) + group.eps)
            shrink = self.shrink(group, self.mean_for(i, with_grad))
            moves_from_zero = self.towards_zero(group, i, direction, g[i]) < 0
            decay_factor = np.where(group.cautious_decay & moves_from_zero, wide(1.0), 1 - wide(shrink))
            before, self.params[i] = self.params[i], decay_factor * self.params[i] - group.lr * direction
            if group.ema_decay is not None:
                weight, average = 1 - self.ema_decay(group, self.steps[i]), self.ema_param[i]
                self.ema_param[i] = average + weight * (self.averaged(i, before) - average)

    def norm(self, grads: list[Array | None]) -> Array:
        return np.sqrt(sum(((wide(g) ** 2).sum() for g in grads if g is not None), start=wide(0.0)))

    def clip_factor(self, grads: list[Array | None]) -> Array:
        if self.max_grad_norm is None:
            return wide(1.0)
        return min(wide(1.0), self.max_grad_norm / (self.norm(grads) + wide(1e-6)))

    def shrink(self, group: Group, mean: Array) -> Array:
        """What a step takes of each weight that decays."""
        if self.decay == "independent":
            return wide(group.weight_decay) * self.correction(group)
        if self.decay == "l2":
            return wide(0)
        lr = wide(group.lr) * (self.correction(group) if group.corrected_decay else 1)
        if self.decay == "decoupled":
            return lr * group.weight_decay
        return (
            min(lr * group.weight_decay / (np.sqrt(mean) + group.eps), wide(group.max_decay)) if mean > 0 else wide(0)
        )

    def towards_zero(self, group: Group, i: int, direction: Array, grad: Array) -> Array:
        return direction * self.params[i]

    def averaged(self, i: int, before: Array) -> Array:
        return self.params[i]

    def ema_decay(self, group: Group, t: int) -> Array:
        assert group.ema_decay is not None
        return wide(min(group.ema_decay, (1 + t) / wide(10 + t)) if group.ema_warmup else group.ema_decay)

    def correction(self, group: Group) -> Array:
        largest = max(group.largest_lr_so_far, group.largest_lr or 0.0)
        return wide(group.lr) / largest if group.lr > 0 else wide(0.0)

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


class OtherSchedule(AdamS):
    """Takes decay before this step's schedule is known, as in swapped passes; or after, where it is lagged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lagged = not self.lagged


def _mean_not_clipped(self: AdamS, with_grad: list[tuple[Group, int]]) -> Array:
    return AdamS.mean(self, with_grad) / min(wide(1.0), (self.max_grad_norm or np.inf) / self.grad_norm) ** 2


MeanPerTensor = wrong("MeanPerTensor", mean_for=lambda self, i, every: self.mean([(g, j) for g, j in every if j == i]))
MeanPerGroup = wrong(
    "MeanPerGroup", mean_for=lambda self, i, every: self.mean([(g, j) for g, j in every if i in g.params])
)
MeanOfDecaying = wrong(
    "MeanOfDecaying", mean=lambda self, every: AdamS.mean(self, [(g, j) for g, j in every if g.weight_decay > 0])
)
MeanNotClipped = wrong("MeanNotClipped", mean=_mean_not_clipped)
NoBiasCorrection = wrong("NoBiasCorrection", bias_correction=lambda self, group, moment, i: wide(1.0))
WRONG = [OtherSchedule, MeanPerTensor, MeanPerGroup, MeanOfDecaying, MeanNotClipped, NoBiasCorrection]

# Wrong where bias is not corrected, or decay is corrected, independent of the learning rate, or cautious.
AlwaysCorrectsBias = wrong(
    "AlwaysCorrectsBias", bias_correction=lambda self, group, moment, i: 1 - wide(group.betas[moment]) ** self.steps[i]
)
NotCorrected = wrong("NotCorrected", correction=lambda self, group: wide(1.0))  # AdamW's
CorrectedTwice = wrong("CorrectedTwice", correction=lambda self, group: AdamS.correction(self, group) ** 2)
LargestOfAllGroups = wrong(
    "LargestOfAllGroups",
    correction=lambda self, group: wide(group.lr) / max(other.largest_lr_so_far for other in self.groups),
)
IndependentTimesLr = wrong(
    "IndependentTimesLr", shrink=lambda self, group, mean: AdamS.shrink(self, group, mean) * group.lr
)
AgreesWithGradient = wrong("AgreesWithGradient", towards_zero=lambda self, group, i, way, grad: grad * self.params[i])
AgreesElsewhere = wrong("AgreesElsewhere", towards_zero=lambda self, group, i, way, grad: -way * self.params[i])
AgreesWithAll = wrong("AgreesWithAll", towards_zero=lambda self, group, i, way, grad: 0 * way)
AgreesAfterUpdate = wrong(
    "AgreesAfterUpdate", towards_zero=lambda self, group, i, way, grad: way * (self.params[i] - group.lr * way)
)

# Wrong where weights are averaged: with a warm-up a step behind, or started as the weight after the first step.
AverageOfOldWeights = wrong("AverageOfOldWeights", averaged=lambda self, i, before: before)
DecayOfStepBefore = wrong("DecayOfStepBefore", ema_decay=lambda self, group, t: AdamS.ema_decay(self, group, t - 1))
AverageFromFirstStep = wrong(
    "AverageFromFirstStep", ema_decay=lambda self, group, t: AdamS.ema_decay(self, group, t) if t > 1 else wide(0.0)
)
