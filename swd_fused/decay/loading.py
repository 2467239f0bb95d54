"""The weight decay in a state dict: of which kind it is, and the values that an optimizer of another kind keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from swd_fused.checks import one_of
from swd_fused.decay.kinds import Decay

Group = Mapping[str, Any]

# The entries of a group that say how much it decays. Values of one kind of decay mean nothing in another.
CALIBRATION = ("adamw_weight_decay", "calibration_steps")
VALUES = ("weight_decay", *CALIBRATION, "max_decay")

# Entries that a group keeps when it loads another, as it keeps the kind of decay: a resumed run may decay otherwise.
VARIANTS = ("corrected_decay", "cautious_decay")

ADAMWS = ("decoupled", None)


def kept_decay(own: Group, saved: Group, decay: Decay) -> tuple[dict[str, Any], str | None]:
    """Returns the entries that a group keeps when `saved` is loaded into it, and a warning if that makes a difference.

    `decay` is the optimizer's own kind.
    """
    kind = _saved_kind(saved)
    is_same = kind == decay or (kind is None and decay in ("decoupled", "l2"))
    # Calibration is for the schedule; torch's AdamW keeps its entries if it has loaded them.
    names = [*VARIANTS, *(() if is_same and decay == "scheduled" else CALIBRATION if is_same else VALUES)]
    if own["largest_lr"] is not None:
        names.append("largest_lr")
    kept = {name: own[name] for name in names}
    (name, value), (saved_name, saved_value) = _decay_of(own, decay), _decay_of(saved, kind)
    starts_from_it = kind in ADAMWS and name == "adamw_weight_decay" and value == saved_value
    if is_same or starts_from_it or value == saved_value == 0:
        return kept, None
    was = repr(kind or "decoupled or l2")
    advice = ""
    if kind in ADAMWS and decay == "scheduled" and name == "weight_decay":
        advice = " To start the schedule from AdamW's value pass it as adamw_weight_decay."
    return kept, (
        f"The state dict has {saved_name}={saved_value!r} for decay={was}, but this optimizer has decay={decay!r}: "
        f"keeping {name}={value!r}. To go on as it was saved build the optimizer with decay={was}.{advice}"
    )


def _saved_kind(saved: Group) -> Decay | None:
    """Returns the kind of a saved group: None is AdamW's or Adam's, of an old torch or apex."""
    if "decoupled_weight_decay" in saved:  # torch's own comes first: its optimizers keep our entries beside it
        return "decoupled" if saved["decoupled_weight_decay"] else "l2"
    kind: Decay | None = saved.get("decay", "scheduled" if "max_decay" in saved else None)  # 0.1 did not save it
    one_of(*get_args(Decay), None).require("decay", kind)
    return kind


def _decay_of(group: Group, kind: Decay | None) -> tuple[str, float]:
    """Returns the name and the value of the entry that counts."""
    is_calibrated = kind == "scheduled" and group.get("weight_decay") and group.get("adamw_weight_decay") is not None
    name = "adamw_weight_decay" if is_calibrated else "weight_decay"
    return name, group.get(name, 0)
