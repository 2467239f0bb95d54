"""The kinds of decay that are compared, all of them FusedAdamS, and what is predicted for their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swd_fused import FusedAdamS

Group = dict[str, Any]

NO_DECAY, ADAMW, ADAMS, ADAMC = "no decay", "AdamW", "AdamS", "AdamC"


@dataclass(frozen=True)
class Contender:
    """`exponent` is that of the learning rate in the gradient norm of scale-invariant layers at equilibrium.

    There decay and updates balance, 2 shrink |p|^2 = lr^2 c, and the gradient goes as 1 / |p|. AdamW shrinks by
    lr * decay, so |p| goes as lr^(1/2); AdamS by lr * decay / gradient, hence as lr * |p|, so |p|^3 goes as lr. The
    correction, times lr / (largest lr), makes |p| constant in both. Cautious decay leaves out a share of the weights
    that is assumed not to depend on lr.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    corrected: bool = False
    exponent: float | None = None

    @property
    def scheduled(self) -> bool:
        return "decay" not in self.options

    @property
    def cautious(self) -> bool:
        return "cautious_decay" in self.options

    def build(
        self, groups: Sequence[Group], lr: float, decay: float, betas: tuple[float, float], calibration_steps: int
    ) -> FusedAdamS:
        """`decay` is in AdamW's terms. AdamS finds its own lambda from it in the first `calibration_steps`.

        `groups` are as `param_groups(corrected_decay=True)` makes them.
        """
        calibration = {"adamw_weight_decay": decay, "calibration_steps": calibration_steps} if self.scheduled else {}
        own = [self._own(group, decay) for group in groups]
        return FusedAdamS(own, lr=lr, betas=betas, **self.options, **calibration)

    def _own(self, group: Group, decay: float) -> Group:
        corrected = self.corrected and group.get("corrected_decay", False)
        return {**group, "weight_decay": decay if group["weight_decay"] > 0 else 0.0, "corrected_decay": corrected}


DECOUPLED, CAUTIOUS = {"decay": "decoupled"}, {"cautious_decay": True}
CONTENDERS = (
    Contender(NO_DECAY, DECOUPLED),
    Contender(ADAMW, DECOUPLED, exponent=-1 / 2),
    Contender(ADAMS, exponent=-1 / 3),
    Contender(ADAMC, DECOUPLED, corrected=True, exponent=0.0),
    Contender("corrected AdamS", corrected=True, exponent=0.0),
    Contender("cautious AdamW", {**DECOUPLED, **CAUTIOUS}, exponent=-1 / 2),
    Contender("cautious AdamS", CAUTIOUS, exponent=-1 / 3),
)
BY_NAME = {contender.name: contender for contender in CONTENDERS}
DECAYING = CONTENDERS[1:]
