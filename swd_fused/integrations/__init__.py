"""Callbacks that log `optimizer.metrics()` from other libraries' trainers, and the optimizers in timm's registry.

`swd_fused.integrations.transformers`, `lightning` and `timm` import those libraries; nothing else does.
"""

from __future__ import annotations

from typing import Any


def find_metrics_source(optimizer: Any) -> Any:
    """Returns the optimizer with `metrics()` below the wrappers of Accelerate, DeepSpeed and Lightning, or None."""
    while optimizer is not None and not hasattr(optimizer, "metrics"):
        inner = getattr(optimizer, "optimizer", None)  # as all three call it
        optimizer = inner if inner is not optimizer else None
    return optimizer


def no_metrics(optimizer: object) -> TypeError:
    """Returns the error for an optimizer without metrics."""
    return TypeError(
        f"swd_fused's callback got a {type(optimizer).__name__}, wanted a FusedAdamS, which has metrics(), or a "
        "wrapper of one. Train with FusedAdamS, or leave the callback out."
    )
