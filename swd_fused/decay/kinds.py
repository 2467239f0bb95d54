"""The kinds of weight decay: the options of a parameter group that say how it decays, and their effect on a step.

An option of the decay is a line in `DecayOptions`, and its effect is in `columns`: the numbers that a step has of a
group's decay. The effective decay and the warning follow from these columns. Loading from state dicts is at the end.

Corrected and independent decay relate the learning rate to the largest one so far. That is an entry of the group, so it
is saved and loaded with it. Skipped steps count too, since the host may not know that they were skipped. The host does
not know the value of a learning rate that is a tensor, so `largest_lr` must then be given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from swd_fused.checks import FINITE, FLAG, Check, is_finite, is_number, is_one_float, is_whole, one_of
from swd_fused.devices.transfer import scalar_dtype

Group = Mapping[str, Any]
Decay = Literal["scheduled", "decoupled", "independent", "l2"]
Lr = TypeVar("Lr", float, Tensor)

SO_FAR = "largest_lr_so_far"

# The defaults: the paper's, those of torch's AdamW and Adam, and AdamW's times its learning rate of 1e-3.
WEIGHT_DECAYS: dict[Decay, float] = {"scheduled": 5e-4, "decoupled": 1e-2, "l2": 0.0, "independent": 1e-5}

# Nobody uses so large a decay with AdamW, whose values are 0.01 to 0.3. The paper's 5e-4 acts like 1.2 at most when
# training of its models begins; AdamW's 0.1, typed out of habit, acts like 161 in a small language model.
FAR_BEYOND_ADAMW = 10.0

SHARE = Check(
    lambda share: is_number(share) and 0 <= share <= 0.05,
    "a number in [0, 0.05] with decay='independent', the share of a weight that a step removes",
    "AdamW's value times its lr is usual.",
)
# Replaces a learning rate of 0, by which an effective decay could not be divided.
ABOUT_TO_RISE = 1e-12

MAX_DECAY = Check(
    lambda share: is_number(share) and 0 < share <= 1, "a number in (0, 1]", "1 lets a step remove the whole weight."
)
STEPS_LEFT = Check(is_whole, "a whole number >= 0, the steps that are left")
LARGEST_LR = Check(
    lambda lr: is_number(lr) and 0 < lr < math.inf, "a finite number > 0", "Use None to follow the learning rate."
)
LARGEST_LR_SO_FAR = Check(
    lambda lr: is_one_float(lr) if isinstance(lr, Tensor) else is_finite(lr), "what steps have left there, or 0.0"
)


class DecayOptions(NamedTuple):
    """Lists the options of a parameter group's decay; `options.GroupOptions` has its other options."""

    weight_decay: Annotated[float, FINITE] = 5e-4
    max_decay: Annotated[float, MAX_DECAY] = 0.1
    adamw_weight_decay: Annotated[float | None, FINITE.or_none()] = None
    calibration_steps: Annotated[int, STEPS_LEFT] = 0
    corrected_decay: Annotated[bool, FLAG] = False
    cautious_decay: Annotated[bool, FLAG] = False
    largest_lr: Annotated[float | None, LARGEST_LR.or_none()] = None
    # Not an argument: `count_lr` sets it. It is a tensor only in state dicts of 0.2.
    largest_lr_so_far: Annotated[float | Tensor, LARGEST_LR_SO_FAR] = 0.0
    # Holds for the whole optimizer, but each group saves it beside the values that it gives a meaning.
    decay: Annotated[Decay, one_of(*get_args(Decay))] = "scheduled"


# --- The effect


def columns(group: Group, lr: float) -> dict[str, float]:
    """Returns the columns of a group's row that say how it decays. At most one of the three amounts is not 0.

    A step multiplies weights by 1 - min(decay_lr * weight_decay / (root of the mean + eps), max_decay) - decay_lr *
    decoupled_decay. `lr` is -1 if it is a tensor, whose `decay_lr` is computed on the device.
    """
    kind, amount = group["decay"], group["weight_decay"]
    if group["adamw_weight_decay"] is not None and kind == "scheduled":
        # During calibration the decay is AdamW's. As with the schedule, weight_decay=0 switches it off.
        kind, amount = "decoupled", group["adamw_weight_decay"] if amount > 0 else 0.0
    return {
        "decay_lr": related_lr(group, lr, largest_lr(group, lr)) if lr > 0 and is_related(group) else lr,
        "weight_decay": amount if kind == "scheduled" else 0.0,
        "max_decay": group["max_decay"],
        "decoupled_decay": amount if kind in ("decoupled", "independent") else 0.0,
        "l2": amount if kind == "l2" else 0.0,
        "cautious": float(group["cautious_decay"]),
    }


def divisor(exp_avg_sq_mean: Lr, eps: Lr | float) -> Lr:
    """Returns the divisor by which the schedule divides `weight_decay`: the root of the mean plus eps."""
    root = exp_avg_sq_mean.sqrt() if isinstance(exp_avg_sq_mean, Tensor) else math.sqrt(exp_avg_sq_mean)
    return root + eps


def decay_factor(exp_avg_sq_mean: Tensor, column: Callable[[str], Tensor]) -> Tensor:
    """Returns for each group the factor by which a step multiplies weights. `column` returns a column by name.

    A mean of zero (only zero gradients so far) decays nothing; nor does NaN, which would spread to all weights.
    """
    lr = column("decay_lr")
    shrink = lr * column("weight_decay") / divisor(exp_avg_sq_mean, column("eps"))
    scheduled = torch.where(exp_avg_sq_mean > 0, torch.minimum(shrink, column("max_decay")), 0.0)
    return 1 - scheduled - lr * column("decoupled_decay")


# --- The effective decay, the warning's bound, and checks


def effective_decay(group: Group, exp_avg_sq_mean: float, lr: float) -> float:
    """Returns the `weight_decay` with which AdamW would shrink the weights of a group as much, within `max_decay`."""
    if math.isnan(exp_avg_sq_mean):
        return math.nan
    lr = max(lr, ABOUT_TO_RISE)
    found = columns(group, lr)
    scheduled = 0.0
    if exp_avg_sq_mean > 0:
        scheduled = found["decay_lr"] * found["weight_decay"] / divisor(exp_avg_sq_mean, group["eps"])
    return (min(scheduled, found["max_decay"]) + found["decay_lr"] * found["decoupled_decay"]) / lr


def harmless_mean(found: Mapping[str, float], lr: float) -> float:
    """Returns a mean at and above which a group with these columns needs no warning."""
    if lr < 0:
        return math.inf if found["weight_decay"] else 0.0
    rms = found["weight_decay"] * max(found["decay_lr"] / found["max_decay"], 1 / FAR_BEYOND_ADAMW)
    return rms * rms


def check_combination(group: Group) -> None:
    """Raises if some options have no meaning together."""
    kind = group["decay"]
    nothing_with = {
        "adamw_weight_decay": ("decoupled", "independent", "l2"),  # no schedule could start from it
        "corrected_decay": ("independent", "l2"),  # related to the largest lr already; acts on the gradient
        "cautious_decay": ("l2",),
    }
    for name, kinds in nothing_with.items():
        if kind in kinds and group[name] not in (None, False):
            raise ValueError(
                f"FusedAdamS got {name}={group[name]!r} with decay={kind!r}, where it means nothing. Leave it out, or "
                "use another decay: docs/weight-decay.md."
            )
    if is_related(group) and isinstance(group["lr"], Tensor) and group["largest_lr"] is None:
        raise ValueError(
            f"FusedAdamS got lr={group['lr']!r} with a decay that depends on the largest one, wanted largest_lr as "
            "well. Pass the peak of the schedule, or use a number for lr."
        )
    if kind == "independent":
        SHARE.require("weight_decay", group["weight_decay"])


# --- The largest learning rate so far


def is_related(group: Group) -> bool:
    """Returns whether the decay of a group depends on the largest learning rate so far."""
    return group["decay"] == "independent" or bool(group["corrected_decay"])


def related_lr(group: Group, lr: Lr, largest: Lr) -> Lr:
    """Returns the factor that multiplies `weight_decay` in place of a learning rate > 0. While `lr` is the largest one,
    corrected decay uses `lr` itself, to the bit."""
    share = lr / largest
    return share if group["decay"] == "independent" else lr * share


def largest_lr(group: Group, lr: float) -> float:
    """Returns the largest learning rate so far, `lr` included. May wait for a device."""
    return max(lr, float(group[SO_FAR]), group["largest_lr"] or 0.0)


def decay_lr_on_device(group: Group) -> Tensor:
    """Returns `related_lr` of a learning rate that is a tensor."""
    lr: Tensor = group["lr"].detach().reshape(()).to(scalar_dtype(group["lr"].device)).clamp(min=0)
    return torch.where(lr > 0, related_lr(group, lr, lr.clamp(min=group["largest_lr"])), 0.0)


def count_lr(group: dict[str, Any]) -> None:
    """Counts the learning rate of a step, taken or skipped, in the largest one so far."""
    if not isinstance(group["lr"], Tensor) and group["lr"] > group[SO_FAR]:
        group[SO_FAR] = float(group["lr"])


# --- Loading from a state dict

# The entries of a group that say how much it decays. The values of one kind of decay have no meaning for another.
CALIBRATION = ("adamw_weight_decay", "calibration_steps")
VALUES = ("weight_decay", *CALIBRATION, "max_decay")

# Entries that a group keeps when it loads another, as it keeps its kind of decay: a resumed run may decay differently.
VARIANTS = ("corrected_decay", "cautious_decay")

ADAMWS = ("decoupled", None)


def kept_decay(own: Group, saved: Group, decay: Decay) -> tuple[dict[str, Any], str | None]:
    """Returns the entries that a group keeps when `saved` is loaded into it, and a warning if its decay differs.

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
    """Returns the kind of a saved group's decay, or None for AdamW's or Adam's, saved by an old torch or by apex."""
    if "decoupled_weight_decay" in saved:  # torch's entry decides: its optimizers keep ours beside it
        return "decoupled" if saved["decoupled_weight_decay"] else "l2"
    kind: Decay | None = saved.get("decay", "scheduled" if "max_decay" in saved else None)  # not saved by 0.1
    one_of(*get_args(Decay), None).require("decay", kind)
    return kind


def _decay_of(group: Group, kind: Decay | None) -> tuple[str, float]:
    """Returns the name and the value of the entry that sets a group's decay."""
    is_calibrated = kind == "scheduled" and group.get("weight_decay") and group.get("adamw_weight_decay") is not None
    name = "adamw_weight_decay" if is_calibrated else "weight_decay"
    return name, group.get(name, 0)
