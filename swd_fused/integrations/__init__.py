"""Callbacks that log `optimizer.metrics()` from other libraries' trainers, and the optimizers in timm's registry.

`swd_fused.integrations.transformers`, `lightning` and `timm` import those libraries; nothing else does.
"""

from __future__ import annotations

from typing import Any

from swd_fused.metrics import EVERY


class MetricsReader:
    """Reads optimizers' metrics under the names that logs have, and after every so many steps their rms gradients."""

    def __init__(self, prefix: str, rms_grads_every: int | None) -> None:
        EVERY.require("rms_grads_every", rms_grads_every)
        self._prefix, self._every, self.last_step = prefix, rms_grads_every, 0

    def read(self, sources: list[Any], step: int) -> dict[str, float]:
        """Returns the metrics of optimizers that have some. Of several optimizers each one's names have its number."""
        every, last, self.last_step = self._every, self.last_step, step
        found: dict[str, float] = {}
        for number, source in enumerate(sources):
            prefix = self._prefix if len(sources) == 1 else f"{self._prefix}{number}/"
            found.update({f"{prefix}{name}": value for name, value in source.metrics().items()})
            if every is not None and step // every > last // every:
                found.update({f"{prefix}rms_grad/{name}": value for name, value in source.rms_grads().items()})
        return found


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
