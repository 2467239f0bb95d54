"""Registers AdamS, AdamW and AdamC with timm, so that its `--opt` and `create_optimizer_v2` find them.

In a script of your own call `register()`. For timm's train.py, as it is:

    python -m swd_fused.integrations.timm train.py --opt fusedadams --weight-decay 0.05 ...
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
from torch import Tensor, nn

from swd_fused import FusedAdamS, FusedAdamW, param_groups

# timm takes what follows the last underscore of a name for the optimizer, and "fusedadamw" is apex's there.
ADAMS, ADAMW, ADAMC = "fusedadams", "swdadamw", "swdadamc"
DESCRIPTIONS = {
    ADAMS: "AdamS by swd_fused: weight_decay is AdamW's value, from which the schedule starts",
    ADAMW: "AdamW by swd_fused, with clipping inside the step (max_grad_norm), 8-bit moments and the like",
    ADAMC: "AdamC by swd_fused: AdamW whose decay is corrected where a norm follows, so not of the classifier",
}


def register() -> None:
    """Makes timm know "fusedadams", "swdadamw" and "swdadamc". A second call changes nothing.

    Also has timm's registry hand the model on to "swdadamc", which otherwise would see parameters without names.
    """
    if ADAMS in default_registry.list_optimizers():
        return
    factories: dict[str, Callable[..., FusedAdamS]] = {ADAMS: adams, ADAMW: adamw, ADAMC: adamc}
    for name, factory in factories.items():
        default_registry.register(OptimInfo(name, factory, DESCRIPTIONS[name], has_betas=True))
    create = default_registry.create_optimizer

    @wraps(create)
    def create_optimizer(model_or_params: Any, opt: str, *args: Any, **options: Any) -> Any:
        if opt.lower().split("_")[-1] == ADAMC and isinstance(model_or_params, nn.Module):
            options.setdefault("corrected", followed_by_a_norm(model_or_params))
        return create(model_or_params, opt, *args, **options)

    default_registry.create_optimizer = create_optimizer


def adams(params: Any, *, weight_decay: float = 0.0, **options: Any) -> FusedAdamS:
    """Returns FusedAdamS with timm's `weight_decay`, its argument's or its groups', in AdamW's terms.

    With `adamw_weight_decay=None` it is the paper's lambda instead, as in FusedAdamS itself.
    """
    if "adamw_weight_decay" in options:
        return FusedAdamS(params, weight_decay=weight_decay, **options)
    groups = as_groups(params)
    decaying = [group for group in groups if group.setdefault("weight_decay", weight_decay)]
    of_each = (
        {"calibration_steps": options.pop("calibration_steps")} if decaying and "calibration_steps" in options else {}
    )
    for group in decaying:
        group.update({"adamw_weight_decay": group["weight_decay"], **of_each, **group})
    return FusedAdamS(groups, weight_decay=weight_decay, **options)


def adamw(params: Any, **options: Any) -> FusedAdamW:
    """Returns AdamW, which decays nothing unless timm says so."""
    return FusedAdamW(params, **{"weight_decay": 0.0, **options})


def adamc(params: Any, *, corrected: Iterable[Tensor] | None = None, **options: Any) -> FusedAdamW:
    """Returns AdamW that is AdamC: the decay of the parameters in `corrected` follows the learning rate.

    `create_optimizer_v2` finds them in the model. Without it, groups must say themselves which are corrected.
    """
    groups = as_groups(params)
    if corrected is not None:
        ids = set(map(id, corrected))
        groups = [part for group in groups for part in split(group, ids)]
    elif not any("corrected_decay" in group for group in groups):
        raise TypeError(
            f"{ADAMC} got parameters only, wanted to know which of them a norm follows. Pass the model to "
            "create_optimizer_v2, or the groups of swd_fused.param_groups(model, weight_decay, corrected_decay=True)."
        )
    return adamw(groups, **options)


def followed_by_a_norm(model: nn.Module) -> list[Tensor]:
    """Returns what AdamC corrects: all matrices but those of the output layer and of embeddings."""
    groups = param_groups(model, corrected_decay=True)
    return [param for group in groups if "corrected_decay" in group for _, param in group["params"]]


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Returns copies of parameter groups, or one group of parameters."""
    listed = list(params)
    are_groups = bool(listed) and isinstance(listed[0], dict)
    return [{**group} for group in listed] if are_groups else [{"params": listed}]


def split(group: dict[str, Any], ids: set[int]) -> list[dict[str, Any]]:
    """Returns the part of a group that is corrected, and the rest. A group that does not decay stays whole."""
    if group.get("weight_decay") == 0:
        return [group]
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    parts: tuple[list[Any], list[Any]] = ([], [])
    for param in params:
        parts[id(param[1] if isinstance(param, tuple) else param) not in ids].append(param)
    of_parts: tuple[dict[str, bool], ...] = ({"corrected_decay": True}, {})
    return [{**group, "params": own, **option} for own, option in zip(parts, of_parts, strict=True) if own]


def main() -> None:
    names = "\n".join(f"  {name:12}{description}" for name, description in DESCRIPTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m swd_fused.integrations.timm",
        description="Run a training script with these optimizers in timm's registry, for its --opt:\n\n" + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", type=Path, help="for instance timm's train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args()
    register()
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)  # as Python has it for a script
    runpy.run_path(str(options.script), run_name="__main__")


if __name__ == "__main__":
    main()
