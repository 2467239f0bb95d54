"""Logs `optimizer.metrics()` with Lightning."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from swd_fused.integrations import find_metrics_source, no_metrics
from swd_fused.rms_grads import EVERY


class MetricsCallback(Callback):
    """Sends the optimizer's metrics to the trainer's loggers, every `log_every_n_steps` steps.

    Args:
        prefix: what the names start with. With several optimizers that have metrics their number follows.
        rms_grads_every: also log `optimizer.rms_grads()`, at the first logged step after every so many steps.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[MetricsCallback()])
    """

    def __init__(self, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
        EVERY.require("rms_grads_every", rms_grads_every)
        self.prefix, self.rms_grads_every = prefix, rms_grads_every
        self._last_step = self._last_logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses to train without an optimizer that has metrics, and with clipping that Lightning would refuse."""
        if not any(find_metrics_source(optimizer) for optimizer in trainer.optimizers):
            raise no_metrics(next(iter(trainer.optimizers), None))
        _check_clipping(trainer)
        self._last_step = self._last_logged = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs after a step whose number is due; batches that only accumulate gradients take none."""
        step = trainer.global_step
        if step == self._last_step or not trainer.loggers:
            return
        due = step // trainer.log_every_n_steps > self._last_step // trainer.log_every_n_steps
        self._last_step = step
        if due:
            metrics = self._metrics(trainer.optimizers, step)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step - 1)  # Lightning counts the first step as 0

    def _metrics(self, optimizers: list[Any], step: int) -> dict[str, float]:
        sources = list(filter(None, map(find_metrics_source, optimizers)))
        named = [(self.prefix if len(sources) == 1 else f"{self.prefix}{i}/", one) for i, one in enumerate(sources)]
        metrics = {f"{prefix}{name}": value for prefix, one in named for name, value in one.metrics().items()}
        every, last, self._last_logged = self.rms_grads_every, self._last_logged, step
        if every is not None and step // every > last // every:
            for prefix, one in named:
                metrics.update({f"{prefix}rms_grad/{name}": value for name, value in one.rms_grads().items()})
        return metrics


def _check_clipping(trainer: Any) -> None:
    """Says what to do about what Lightning only says is not allowed, and after the first backward pass."""
    is_mixed = any(cls.__name__ == "MixedPrecision" for cls in type(trainer.precision_plugin).__mro__)
    if is_mixed and trainer.gradient_clip_val:
        raise ValueError(
            f"lightning.Trainer got gradient_clip_val={trainer.gradient_clip_val:g} with mixed precision, which it "
            "refuses for optimizers that unscale gradients in their step. Leave it out, and let the step clip: "
            f"FusedAdamS(..., max_grad_norm={trainer.gradient_clip_val:g})."
        )
