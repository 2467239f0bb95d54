"""Logs `optimizer.metrics()` with Lightning."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from swd_fused.integrations import passes, read_metrics


class MetricsCallback(Callback):
    """Sends the optimizer's metrics to the trainer's loggers, every `log_every_n_steps` steps.

    Names start with `prefix`, followed by the optimizer's number if several have metrics. At the first logged step
    after every `rms_grads_every` steps, the callback also logs `optimizer.rms_grads()`.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[MetricsCallback()])
    """

    def __init__(self, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
        self._prefix, self._every = prefix, rms_grads_every
        self._last_step = self._last_logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_step = self._last_logged = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs if this batch took a step that is due. Batches that only accumulate gradients take no step."""
        step, last = trainer.global_step, self._last_step
        self._last_step = step
        if passes(last, step, trainer.log_every_n_steps) and trainer.loggers:
            metrics = read_metrics(trainer.optimizers, self._prefix, passes(self._last_logged, step, self._every))
            self._last_logged = step
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step - 1)  # Lightning counts the first step as 0
