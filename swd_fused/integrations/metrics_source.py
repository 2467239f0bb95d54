"""Finds the optimizer that has metrics below the wrappers of trainers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricsSource(Protocol):
    """FusedAdamS, or any other optimizer that tells the same."""

    def metrics(self) -> dict[str, float]: ...


def find_metrics_source(optimizer: object) -> MetricsSource | None:
    """Returns the optimizer below the wrappers of Accelerate, DeepSpeed and Lightning, which call it `optimizer`."""
    while optimizer is not None:
        if isinstance(optimizer, MetricsSource):
            return optimizer
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if inner is not optimizer else None
    return None


def no_metrics(optimizer: object) -> TypeError:
    """Returns the error for an optimizer without metrics."""
    return TypeError(
        f"swd_fused's callback got a {type(optimizer).__name__}, wanted a FusedAdamS, which has metrics(), or a "
        "wrapper of one. Train with FusedAdamS, or leave the callback out."
    )
