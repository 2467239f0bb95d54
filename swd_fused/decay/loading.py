"""The weight decay in a state dict: of which kind it is, and what an optimizer of another kind keeps instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from swd_fused.checks import message
from swd_fused.decay.kinds import Decay

Group = Mapping[str, Any]

# The entries of a group that say how much it decays. Values of one kind of decay mean nothing in another.
CALIBRATION = ("adamw_weight_decay", "calibration_steps")
VALUES = ("weight_decay", *CALIBRATION, "max_decay")

# Entries that a group keeps when it loads another, as it keeps the kind of decay: a resumed run may decay otherwise.
VARIANTS = ("corrected_decay", "cautious_decay")

DESCRIPTIONS = {
    "scheduled": "scheduled decay, which is divided by the rms gradient",
    "decoupled": "AdamW's decoupled decay",
    "independent": "decay independent of the learning rate's size",
    "l2": "Adam's L2 regularization",
    None: "AdamW's or Adam's decay",
}


class GroupDecay(NamedTuple):
    """Holds how a group decays."""

    kind: Decay | None  # None: AdamW's or Adam's
    name: str  # of the entry that counts
    value: float

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"

    @property
    def adamw_value(self) -> float | None:
        """The value that AdamW would have, as far as it is known."""
        is_known = self.kind in ("decoupled", None) or self.name == "adamw_weight_decay"
        return self.value if is_known else None


def kept_decay(own: Group, saved: Group, decay: Decay) -> tuple[dict[str, Any], str | None]:
    """Returns the entries that a group keeps when `saved` is loaded into it, and a warning if that makes a difference.

    `decay` is the optimizer's own kind.
    """
    ours, theirs = _decay_of(own, decay), _decay_of(saved, _saved_kind(saved))
    variants = {key: own[key] for key in (*VARIANTS, *(["largest_lr"] if own["largest_lr"] is not None else []))}
    if theirs.kind == decay or (theirs.kind is None and decay in ("decoupled", "l2")):
        # Calibration is for the schedule; torch's AdamW keeps its entries if it has loaded them.
        kept = variants | {key: own[key] for key in CALIBRATION if decay != "scheduled"}
        return kept, _warning_of_variants(own, saved) if ours.value or theirs.value else None
    kept = variants | {key: own[key] for key in VALUES}
    goes_on = decay == "scheduled" and ours.adamw_value is not None and ours.adamw_value == theirs.adamw_value
    if goes_on or ours.value == theirs.value == 0:
        return kept, None
    return kept, (
        f"The state dict has {theirs} for {DESCRIPTIONS[theirs.kind]}, but this optimizer has {DESCRIPTIONS[decay]}: "
        f"keeping {ours}. {_advice(ours, theirs)}"
    )


def _warning_of_variants(own: Group, saved: Group) -> str | None:
    differing = [key for key in VARIANTS if saved.get(key, own[key]) != own[key]]
    if not differing or "decoupled_weight_decay" in saved:  # torch's optimizers have kept our entries unused
        return None
    was, now = (", ".join(f"{key}={group[key]!r}" for key in differing) for group in (saved, own))
    return (
        f"The state dict was saved with {was}, but this optimizer has {now}: keeping that. To go on as it was saved "
        f"build the optimizer with {was}."
    )


def _saved_kind(saved: Group) -> Decay | None:
    if "decoupled_weight_decay" in saved:  # torch's own comes first: its optimizers keep our entries beside it
        return "decoupled" if saved["decoupled_weight_decay"] else "l2"
    kind: Decay | None = saved.get("decay")
    if kind is None and "max_decay" in saved:  # older versions of ours did not save it
        return "scheduled"
    if kind not in tuple(DESCRIPTIONS):
        known = tuple(filter(None, DESCRIPTIONS))
        raise ValueError(message("decay", kind, f"one of {known}", "It is a saved group's: the state dict is damaged."))
    return kind


def _decay_of(group: Group, kind: Decay | None) -> GroupDecay:
    weight_decay = group.get("weight_decay", 0)
    if kind == "scheduled" and weight_decay and group.get("adamw_weight_decay") is not None:
        return GroupDecay(kind, "adamw_weight_decay", group["adamw_weight_decay"])
    return GroupDecay(kind, "weight_decay", weight_decay)


def _advice(ours: GroupDecay, theirs: GroupDecay) -> str:
    kinds = " or ".join(repr(kind) for kind in (("decoupled", "l2") if theirs.kind is None else (theirs.kind,)))
    advice = f"To go on as it was saved build the optimizer with decay={kinds}."
    if ours.kind == "scheduled" and ours.adamw_value is None and ours.value and theirs.adamw_value is not None:
        return (
            f"To have the schedule start from AdamW's decay call optimizer.match_adamw(weight_decay="
            f"{theirs.adamw_value!r}). {advice}"
        )
    if ours.kind == "decoupled" and theirs.kind == "scheduled":
        return f"AdamW's value is what effective_weight_decay() of the saved optimizer returns. {advice}"
    return advice
