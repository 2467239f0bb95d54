"""The weight decay in a state dict: of which kind it is, and the values that an optimizer of another kind keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def kept_decay(own: Group, saved: Group, decay: Decay) -> tuple[dict[str, Any], str | None]:
    """Returns the entries that a group keeps when `saved` is loaded into it, and a warning if that makes a difference.

    `decay` is the optimizer's own kind.
    """
    kind = _saved_kind(saved)
    (name, value), (saved_name, saved_value) = _decay_of(own, decay), _decay_of(saved, kind)
    kept = {key: own[key] for key in (*VARIANTS, *(["largest_lr"] if own["largest_lr"] is not None else []))}
    if kind == decay or (kind is None and decay in ("decoupled", "l2")):
        # Calibration is for the schedule; torch's AdamW keeps its entries if it has loaded them.
        kept |= {key: own[key] for key in CALIBRATION if decay != "scheduled"}
        return kept, _warning_of_variants(own, saved) if value or saved_value else None
    kept |= {key: own[key] for key in VALUES}
    is_adamws = kind in ("decoupled", None)
    starts_from_it = is_adamws and name == "adamw_weight_decay" and value == saved_value
    if starts_from_it or value == saved_value == 0:
        return kept, None
    kinds = " or ".join(repr(each) for each in (("decoupled", "l2") if kind is None else (kind,)))
    advice = f"To go on as it was saved build the optimizer with decay={kinds}."
    if is_adamws and decay == "scheduled" and name == "weight_decay" and value:
        advice = f"To start the schedule from AdamW's decay set adamw_weight_decay={saved_value!r}. {advice}"
    return kept, (
        f"The state dict has {saved_name}={saved_value!r} for {DESCRIPTIONS[kind]}, but this optimizer has "
        f"{DESCRIPTIONS[decay]}: keeping {name}={value!r}. {advice}"
    )


def _warning_of_variants(own: Group, saved: Group) -> str | None:
    differing = [key for key in VARIANTS if saved.get(key, own[key]) != own[key]]
    if not differing or "decoupled_weight_decay" in saved:  # torch's optimizers have kept our entries unused
        return None
    was, now = (", ".join(f"{key}={group[key]!r}" for key in differing) for group in (saved, own))
    return f"The state dict was saved with {was}, but this optimizer has {now}: keeping that."


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


def _decay_of(group: Group, kind: Decay | None) -> tuple[str, float]:
    """Returns the name and the value of the entry that counts."""
    is_calibrated = kind == "scheduled" and group.get("weight_decay") and group.get("adamw_weight_decay") is not None
    name = "adamw_weight_decay" if is_calibrated else "weight_decay"
    return name, group.get(name, 0)
