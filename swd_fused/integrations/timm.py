"""Registers AdamS, AdamW and AdamC with timm: after `register()` its `--opt` and `create_optimizer_v2` find them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
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

    From then on timm's registry also passes the model to "swdadamc", which otherwise would see parameters alone.
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
    steps = {name: options.pop(name) for name in options.keys() & {"calibration_steps"} if decaying}
    for group in decaying:
        group.update({"adamw_weight_decay": group["weight_decay"], **steps, **group})
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
    corrected, rest = ({**group, "params": part} for part in parts)
    return [part for part in ({**corrected, "corrected_decay": True}, rest) if part["params"]]
