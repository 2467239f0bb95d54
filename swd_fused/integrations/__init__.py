"""Callbacks that log `optimizer.metrics()` from other libraries' trainers, and the optimizers in timm's registry.

`swd_fused.integrations.transformers`, `lightning` and `timm` import those libraries; nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def metrics_sources(optimizers: Iterable[Any]) -> list[Any]:
    """Returns the optimizers with `metrics()` below the wrappers of Accelerate, DeepSpeed and Lightning."""
    found, others = [], []
    for optimizer in optimizers:
        inner = optimizer
        while inner is not None and not hasattr(inner, "metrics"):
            below = getattr(inner, "optimizer", None)  # as all three call it
            inner = below if below is not inner else None
        if inner is None:
            others.append(type(optimizer).__name__)
        else:
            found.append(inner)
    if not found:
        raise TypeError(
            f"swd_fused's callback got optimizers {others}, wanted a FusedAdamS, or a wrapper of one. Train with "
            "FusedAdamS, or leave the callback out."
        )
    return found


def read_metrics(optimizers: Iterable[Any], prefix: str) -> dict[str, float]:
    """Returns the metrics of optimizers that have some. Of several optimizers each one's names have its number."""
    sources = metrics_sources(optimizers)
    prefixes = [prefix] if len(sources) == 1 else [f"{prefix}{number}/" for number in range(len(sources))]
    pairs = zip(prefixes, sources, strict=True)
    return {own + name: value for own, source in pairs for name, value in source.metrics().items()}
