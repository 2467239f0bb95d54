"""Registers AdamS and AdamW with timm, so that its `--opt` and `create_optimizer_v2` find them after `register()`."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

from swd_fused.adamw import FusedAdamW
from swd_fused.decay.observers import CALIBRATION_STEPS
from swd_fused.optimizer import FusedAdamS

# timm looks up the part of a name after its last underscore, and "fusedadamw" is apex's there.
DESCRIPTIONS = {
    "fusedadams": "AdamS by swd_fused: weight_decay is AdamW's value, from which the schedule starts",
    "swdadamw": "AdamW by swd_fused, with clipping inside the step (max_grad_norm), 8-bit moments and the like",
}


def register() -> None:
    """Registers "fusedadams" and "swdadamw" with timm. A second call changes nothing."""
    if "fusedadams" in default_registry.list_optimizers():
        return
    factories = adams, partial(FusedAdamW, weight_decay=0.0)  # timm's default: no decay
    for (name, description), factory in zip(DESCRIPTIONS.items(), factories, strict=True):
        default_registry.register(OptimInfo(name, factory, description, has_betas=True))


def adams(params: Any, *, weight_decay: float = 0.0, **options: Any) -> FusedAdamS:
    """Returns FusedAdamS, taking timm's `weight_decay`, from the argument or from groups, as AdamW's value.

    With `adamw_weight_decay=None` it is the paper's lambda instead, as in FusedAdamS itself.
    """
    if "adamw_weight_decay" in options:
        return FusedAdamS(params, weight_decay=weight_decay, **options)
    steps, listed = options.pop("calibration_steps", CALIBRATION_STEPS), list(params)
    are_groups = bool(listed) and isinstance(listed[0], dict)
    groups: list[dict[str, Any]] = [{**group} for group in listed] if are_groups else [{"params": listed}]
    for group in groups:
        decay = group.setdefault("weight_decay", weight_decay)
        if decay:
            group.update({"adamw_weight_decay": decay, "calibration_steps": steps, **group})
    return FusedAdamS(groups, weight_decay=weight_decay, **options)
