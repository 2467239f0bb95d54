"""The groups of a wrapped optimizer: whose decay is taken over, and what the schedule needs to know of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

from swd_fused.user_warning import warn_user

# What optimizers without such a group entry are given: Adam's usual ones.
BETA2 = 0.999
EPS = 1e-8

LAMBDA, MOST = "scheduled_weight_decay", "max_decay"

DECOUPLED = "decoupled_weight_decay"


class Lambdas(NamedTuple):
    """How lambda follows from a group's own `weight_decay`."""

    given: float | None  # lambda of groups whose decay is the largest; None if each group's decay is its lambda
    largest: float  # decay of the wrapped optimizer's groups, 0 if none decays

    def of(self, own: float) -> float:
        if self.given is None:
            return own
        return self.given * (own / self.largest) if self.largest > 0 else self.given


def own_decay(group: dict[str, Any]) -> float:
    return float(group.get("weight_decay") or 0.0)


def lambdas_of(groups: list[dict[str, Any]], given: float | None) -> Lambdas:
    """Returns how lambda follows from the decay of groups that do not say it themselves, and warns where that has to
    be known."""
    decays = sorted({own_decay(group) for group in groups if LAMBDA not in group} - {0.0}, reverse=True)
    if given is None:
        if not decays and not any(group.get(LAMBDA) for group in groups):
            raise ValueError(
                "ScheduledWeightDecay got weight_decay=None, which takes each group's own weight_decay as lambda, but "
                "no group decays. Pass a number, such as 5e-4, or give groups a weight_decay > 0."
            )
    elif len(decays) > 1:
        listed = ", ".join(f"{decay:g}" for decay in decays)
        warn_user(
            f"ScheduledWeightDecay got groups whose weight_decay differs: {listed}. "
            f"Lambda is {given:g} where it is the largest, and smaller by the same ratio elsewhere. "
            "weight_decay=None takes each group's own value as lambda, and a group's scheduled_weight_decay sets it.",
        )
    return Lambdas(given, decays[0] if decays else 0.0)


def take_over(group: dict[str, Any], weight_decay: float, max_decay: float) -> None:
    group.setdefault(LAMBDA, weight_decay)
    group.setdefault(MOST, max_decay)
    if "weight_decay" in group:
        group["weight_decay"] = 0.0


def beta2_of(group: dict[str, Any]) -> float:
    return float(group["betas"][1]) if "betas" in group else BETA2


def eps_of(group: dict[str, Any]) -> float:
    """Adafactor has two in one entry, neither of which is Adam's."""
    eps = group.get("eps")
    return float(eps) if isinstance(eps, Real) else EPS


def schedule_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as FusedAdamS would have them, for the schedule that both share."""
    return [
        {
            "lr": group["lr"],
            "betas": (0.0, beta2_of(group)),
            "eps": eps_of(group),
            "weight_decay": group[LAMBDA],
            "max_decay": group[MOST],
            "maximize": False,
            "decay": "scheduled",
            "adamw_weight_decay": None,
            "corrected_decay": False,
            "cautious_decay": False,
        }
        for group in groups
    ]


@contextmanager
def decaying(groups: Sequence[tuple[dict[str, Any], float]]) -> Iterator[None]:
    """Makes the wrapped optimizer decay groups by these values, decoupled, as long as this lasts."""
    before = [(group, group["weight_decay"], group[DECOUPLED]) for group, _ in groups]
    try:
        for group, decay in groups:
            group["weight_decay"], group[DECOUPLED] = decay, True
        yield
    finally:
        for group, own, decoupled in before:
            group["weight_decay"], group[DECOUPLED] = own, decoupled
