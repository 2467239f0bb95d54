"""The definition with all of the package's options, one step at a time from whatever state there is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tests.definition import AdamS, Array, Group, wide


@dataclass
class OneStep(AdamS):
    """Adds Adam's L2 regularization and the lagged schedule.

    Meant for a single step: `params`, `exp_avg`, `exp_avg_sq`, `max_exp_avg_sq` and `steps` are set before it to what
    the optimizer under test holds. So no rounding of the steps before counts, and whatever follows from anything else
    than the state is found out.

    Lagged: the mean of v^ over all elements of all parameters that have taken a step, as the state stands at the
    beginning of this step, whether or not they have a gradient now. As long as no element has taken one, exact.
    """

    lagged: bool = False
    applied: list[Array | None] = field(init=False)  # gradients after clipping and L2
    applied_size: list[Array | None] = field(init=False)  # of the terms that they are sums of

    def step(self, grads: list[Array | None]) -> None:
        self.last_mean = self._last_mean() if self.lagged else None
        groups = self.groups
        clip, norm = self._clip(grads), self.norm(grads)
        self.applied, self.applied_size = [None] * len(grads), [None] * len(grads)
        for group in groups:
            l2 = group.weight_decay * (-1 if group.maximize else 1)
            for i in group.params:
                if grads[i] is not None:
                    terms = [clip * grads[i], l2 * self.params[i]] if self.decay == "l2" else [clip * grads[i]]
                    self.applied[i], self.applied_size[i] = sum(terms), sum(map(abs, terms))
        if self.decay == "l2":
            self.groups = [replace(group, weight_decay=0.0) for group in groups]
        max_grad_norm, self.max_grad_norm = self.max_grad_norm, None
        super().step(self.applied)
        self.groups, self.max_grad_norm, self.grad_norm = groups, max_grad_norm, norm

    def norm(self, grads: list[Array | None]) -> Array:
        return np.sqrt(sum(((wide(g) ** 2).sum() for g in grads if g is not None), start=wide(0.0)))

    def _clip(self, grads: list[Array | None]) -> Array:
        if self.max_grad_norm is None:
            return wide(1.0)
        return min(wide(1.0), self.max_grad_norm / (self.norm(grads) + wide(1e-6)))

    def _last_mean(self) -> Array | None:
        stepped = [(group, i) for group in self.groups for i in group.params if self.steps[i] > 0]
        return super().mean(stepped) if sum(self.params[i].size for _, i in stepped) else None

    def mean(self, with_grad: list[tuple[Group, int]]) -> Array:
        return super().mean(with_grad) if self.last_mean is None else self.last_mean
