"""The kinds of decay that are compared, all of them FusedAdamS, and what is predicted for their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swd_fused import FusedAdamS

Group = dict[str, Any]

NO_DECAY, ADAMW, ADAMS, ADAMC = "no decay", "AdamW", "AdamS", "AdamC"


@dataclass(frozen=True)
class Contender:
    """Decays as AdamW does, or as AdamS if `scheduled`."""

    name: str
    scheduled: bool = False
    corrected: bool = False
    cautious: bool = False

    @property
    def exponent(self) -> float:
        """Returns that of the learning rate in the gradient norm of scale-invariant layers at equilibrium.

        There decay and updates balance, 2 shrink |p|^2 = lr^2 c, and the gradient goes as 1 / |p|. AdamW shrinks by
        lr * decay, so |p| goes as lr^(1/2); AdamS by lr * decay / gradient, hence as lr * |p|, so |p|^3 goes as lr. The
        correction, times lr / (largest lr), makes |p| constant in both. Cautious decay leaves out a share of the
        weights that is assumed not to depend on lr.
        """
        return 0.0 if self.corrected else -1 / 3 if self.scheduled else -1 / 2

    def build(
        self, groups: Sequence[Group], lr: float, decay: float, betas: tuple[float, float], calibration_steps: int
    ) -> FusedAdamS:
        """`decay` is in AdamW's terms. AdamS finds its own lambda from it in the first `calibration_steps`.

        `groups` are as `param_groups(corrected_decay=True)` makes them.
        """
        own = []
        for group in groups:
            corrected = self.corrected and group.get("corrected_decay", False)
            own.append({**group, "weight_decay": decay * (group["weight_decay"] > 0), "corrected_decay": corrected})
        calibration = {"adamw_weight_decay": decay, "calibration_steps": calibration_steps}
        options: dict[str, Any] = calibration if self.scheduled else {"decay": "decoupled"}
        return FusedAdamS(own, lr=lr, betas=betas, cautious_decay=self.cautious, **options)


CONTENDERS = (
    Contender(NO_DECAY),
    Contender(ADAMW),
    Contender(ADAMS, scheduled=True),
    Contender(ADAMC, corrected=True),
    Contender("corrected AdamS", scheduled=True, corrected=True),
    Contender("cautious AdamW", cautious=True),
    Contender("cautious AdamS", scheduled=True, cautious=True),
)
BY_NAME = {contender.name: contender for contender in CONTENDERS}
DECAYING = CONTENDERS[1:]
