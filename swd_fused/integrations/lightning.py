"""Logs `optimizer.metrics()` with Lightning."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from swd_fused.integrations import MetricsReader, find_metrics_source, no_metrics


class MetricsCallback(Callback):
    """Sends the optimizer's metrics to the trainer's loggers, every `log_every_n_steps` steps.

    Args:
        prefix: what the names start with. With several optimizers that have metrics their number follows.
        rms_grads_every: also log `optimizer.rms_grads()`, at the first logged step after every so many steps.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[MetricsCallback()])
    """

    def __init__(self, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
        self._reader = MetricsReader(prefix, rms_grads_every)
        self._last_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses to train without an optimizer that has metrics."""
        if not any(find_metrics_source(optimizer) for optimizer in trainer.optimizers):
            raise no_metrics(next(iter(trainer.optimizers), None))
        self._last_step = self._reader.last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs after a step whose number is due; batches that only accumulate gradients take none."""
        step = trainer.global_step
        if step == self._last_step or not trainer.loggers:
            return
        due = step // trainer.log_every_n_steps > self._last_step // trainer.log_every_n_steps
        self._last_step = step
        if due:
            sources = list(filter(None, map(find_metrics_source, trainer.optimizers)))
            metrics = self._reader.read(sources, step)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step - 1)  # Lightning counts the first step as 0
