"""Callbacks that log `optimizer.metrics()` from other libraries' trainers, and registration with timm.

Only `swd_fused.integrations.transformers`, `lightning` and `timm` import these libraries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def read_metrics(optimizers: Iterable[Any], prefix: str, with_rms_grads: bool = False) -> dict[str, float]:
    """Returns the metrics of optimizers that have some, looking within wrappers of Accelerate, DeepSpeed and Lightning.

    With several such optimizers, names include their number. `with_rms_grads` adds each parameter's rms gradient.
    """
    sources, kinds = [], []
    for optimizer in optimizers:
        kinds.append(type(optimizer).__name__)
        while optimizer is not None and not hasattr(optimizer, "metrics"):
            inner = getattr(optimizer, "optimizer", None)  # the attribute's name in all three
            optimizer = inner if inner is not optimizer else None
        sources += [] if optimizer is None else [optimizer]
    if not sources:
        raise TypeError(
            f"swd_fused's callback got optimizers {kinds}, wanted a FusedAdamS, or a wrapper of one. Train with "
            "FusedAdamS, or leave the callback out."
        )
    prefixes = [prefix] if len(sources) == 1 else [f"{prefix}{number}/" for number in range(len(sources))]
    found: dict[str, float] = {}
    for own, source in zip(prefixes, sources, strict=True):
        found.update({own + name: value for name, value in source.metrics().items()})
        if with_rms_grads:
            found.update({f"{own}rms_grad/{name}": value for name, value in source.rms_grads().items()})
    return found


def passes(last: int, step: int, every: int | None) -> bool:
    """Returns whether a multiple of `every` lies after `last` and not after `step`; False if `every` is None."""
    return every is not None and step // every > last // every
