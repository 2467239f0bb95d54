"""Skips steps whose gradient norm stands out from earlier ones, or clips them by ZClip's reciprocal rule.

    z = (norm - mean) / deviation, with mean and deviation of the norms of steps that were taken
    "skip":  where z > sigma the step changes nothing
    "clip":  where z > sigma gradients are clipped to mean + sigma^2 / z * deviation (arXiv 2504.02507)

Everything is computed with zero-dimensional tensors on the device, between pass 1 and pass 2. The carried numbers are
one tensor in the first parameter group, updated in place. So they are saved and loaded with the group, and a CUDA graph
advances them in each replay.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from swd_fused.checks import message
from swd_fused.core.schedule import Gate
from swd_fused.core.values import Groups
from swd_fused.devices import graphs
from swd_fused.devices.transfer import is_fake, scalar_dtype, to_device
from swd_fused.observer import Observer
from swd_fused.options import Options

if TYPE_CHECKING:
    from swd_fused.core.sources import Source
    from swd_fused.core.step import Step

KEY = "norm_statistics"  # the first group's entry with the carried numbers

# As in ZClip: the first steps only measure, by plain averages. After them a new norm has this weight.
MEASURED_STEPS = 25
WEIGHT = 0.03

# A model that has moved to another regime would never train again if all its steps were skipped.
MOST_SKIPS_IN_A_ROW = 10

# A share of the mean. Norms that differ by rounding only, as after clipping by the user, do not stand out.
LEAST_DEVIATION = 1e-6


class Norms(NamedTuple):
    """Names the carried numbers."""

    mean: Tensor
    variance: Tensor
    counted: Tensor  # how many norms mean and variance cover
    skips_in_a_row: Tensor
    outliers: Tensor
    steps: Tensor  # all that were judged

    def reach(self, sigma: float) -> Tensor:
        """Returns the largest distance above the mean at which a norm does not stand out."""
        return sigma * self.variance.sqrt().add(self.mean, alpha=LEAST_DEVIATION)

    def judgement(self, norm: Tensor, options: Options) -> Judgement:
        """Decides about a step by its norm. A norm that is not finite does not stand out."""
        excess, reach = norm - self.mean, self.reach(options.outlier_sigma)
        is_outlier = (excess > reach) & (norm < math.inf) & (self.counted >= MEASURED_STEPS)
        if options.outliers == "skip":
            return Judgement(norm, is_outlier, is_outlier & (self.skips_in_a_row < MOST_SKIPS_IN_A_ROW), None)
        clipped = torch.where(is_outlier, self.mean + reach.square() / excess, norm)
        clip_factor = torch.where(is_outlier, clipped / norm, 1.0)
        return Judgement(clipped, is_outlier, torch.zeros_like(is_outlier), clip_factor)

    def after(self, judged: Judgement) -> Tensor:
        """Returns the numbers after a step. Its norm enters the averages unless the step is skipped."""
        norm, is_outlier, skips, _ = judged
        counted = self.counted + ~skips
        is_measured = counted <= MEASURED_STEPS
        weight = ~skips * torch.where(is_measured, counted.reciprocal(), WEIGHT)
        mean = self.mean.lerp(norm, weight)
        # With the old and the new mean it is Welford's, exact for plain averages; with the new one twice it is ZClip's.
        square = (norm - mean) * (norm - torch.where(is_measured, self.mean, mean))
        variance = self.variance.lerp(square, weight)
        in_a_row = (self.skips_in_a_row + 1) * skips
        return torch.stack([mean, variance, counted, in_a_row, self.outliers + is_outlier, self.steps + 1])


class Judgement(NamedTuple):
    """Holds the decision about a step."""

    norm: Tensor  # after clipping
    is_outlier: Tensor
    skips: Tensor
    clip_factor: Tensor | None


class OutlierGate(Gate):
    """A gate that also skips or clips steps that stand out."""

    watch: OutlierWatch
    source: Source  # not the step, which refers to its gate: the cycle would keep both alive
    groups: Groups
    judgement: Judgement | None = None
    skips_anyway: Tensor | None = None  # whether the step is skipped for another reason

    def judged(self, grad_sq: Tensor | None) -> Judgement:
        """Decides once about a step, even if several calls take it: the first call has counted its norm already."""
        assert grad_sq is not None, "it needs pass 1 or the caller's sum"
        if self.judgement is None:
            begun = self.watch.latest if self.source.continues else None
            self.judgement = begun or self.watch.judge(self.grad_norm(grad_sq), self.groups)
        return self.judgement

    def grad_factor(self, grad_sq: Tensor | None, device: torch.device) -> Tensor | None:
        factor, own = super().grad_factor(grad_sq, device), self.judged(grad_sq).clip_factor
        if own is None:
            return factor
        unscale = self.unscale(device)
        own = own if unscale is None else unscale * own
        return own if factor is None else torch.minimum(factor, own)

    def skip(self, found: Tensor, grad_sq: Tensor | None) -> Tensor | None:
        self.skips_anyway = skip = super().skip(found, grad_sq)
        return None if skip is None else torch.maximum(skip, self.judged(grad_sq).skips.to(skip.dtype))


class OutlierWatch(Observer):
    """Makes the gates that judge steps by their norms, and observes steps to update the carried numbers."""

    def __init__(self) -> None:
        self.options = Options()
        self.latest: Judgement | None = None
        self._numbers: Tensor | None = None

    def gate(self, step: Step) -> Gate:
        """Returns a step's gate. With outliers="skip", steps whose norm is not finite are skipped as well."""
        gate = OutlierGate(*step.gate)
        if self.options.outliers == "skip":
            gate = gate._replace(skip_nonfinite=True, may_skip=True)
        gate.watch, gate.source, gate.groups = self, step.source, step.groups
        return gate

    def judge(self, norm: Tensor, groups: Groups) -> Judgement:
        numbers = norm.new_zeros(len(Norms._fields)) if is_fake(norm) else self._carried(groups, norm.device)
        if graphs.is_capturing(norm.device):
            graphs.keep(numbers)  # the graph updates them in each replay
        return Norms(*numbers.unbind()).judgement(norm, self.options)

    def _carried(self, groups: Groups, device: torch.device) -> Tensor:
        """Returns the carried numbers on this device: the same for all groups, if a wrapper shows them one by one."""
        numbers: Tensor | None = groups[0].get(KEY, self._numbers)
        if numbers is None:
            numbers = torch.zeros(len(Norms._fields), dtype=scalar_dtype(device), device=device)
        elif numbers is not self._numbers or numbers.device != device:
            numbers = to_device(torch.as_tensor(numbers), device, scalar_dtype(device))
            wanted = f"the {len(Norms._fields)} numbers that steps leave there"
            if numbers.shape != (len(Norms._fields),):
                raise ValueError(message(KEY, numbers, wanted, "To measure anew delete it from the group."))
        groups[0][KEY] = self._numbers = numbers
        return numbers

    def metrics(self, options: Options, groups: Groups) -> dict[str, float]:
        """Returns the share of steps that stood out, and the norm above which one would stand out now. Waits."""
        if options.outliers is None:
            return {}
        numbers = groups[0].get(KEY, torch.zeros(len(Norms._fields), device="cpu"))
        norms = Norms(*torch.as_tensor(numbers))
        threshold = float(norms.mean + norms.reach(options.outlier_sigma))
        return {
            "outlier_share": float(norms.outliers / norms.steps),
            "outlier_threshold": threshold if norms.counted >= MEASURED_STEPS else math.inf,
        }

    # --- As an observer

    def concerns(self, groups: Groups, options: Options) -> bool:
        self.options = options
        return options.outliers is not None

    def note(self, step: Step) -> None:
        """Counts a step, unless its norm is 0 or not finite, or the step is skipped for another reason."""
        gate, numbers = step.gate, self._numbers
        if not isinstance(gate, OutlierGate) or gate.judgement is None or numbers is None or step.is_continued:
            return
        self.latest = gate.judgement
        norm = gate.judgement.norm
        counts = (norm > 0) & (norm < math.inf)
        if gate.skips_anyway is not None:
            counts = counts & (gate.skips_anyway == 0)
        if not is_fake(norm):
            numbers.copy_(torch.where(counts, Norms(*numbers.unbind()).after(gate.judgement), numbers))

    def refuse_capture(self, step: Step) -> None:
        numbers = step.groups[0].get(KEY, self._numbers)
        if not isinstance(numbers, Tensor) or numbers.device != step.ranks.device:
            raise graphs.first_in_capture("with outliers", "the averages of the norms")

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Continues from loaded numbers. Drops the group's own, from before loading, if none were loaded."""
        for group in entries:
            if self._numbers is not None and group.get(KEY) is self._numbers:
                del group[KEY]
        self._numbers = self.latest = None
