"""Logs `optimizer.metrics()` with Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from swd_fused.integrations import MetricsReader, find_metrics_source, no_metrics


class MetricsCallback(TrainerCallback):
    """Adds the optimizer's metrics to what Trainer logs beside the loss, at the `logging_steps`.

    Attach it by `log_metrics(trainer)`. Passed as `Trainer(callbacks=[MetricsCallback()])` it comes after the callbacks
    for TensorBoard, W&B and the like, which then have no metrics.

    Args:
        prefix: what the names start with. Trainer has a "grad_norm" of its own.
        rms_grads_every: also log `optimizer.rms_grads()`, at the first `logging_steps` after every so many steps.
    """

    def __init__(self, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
        self._reader = MetricsReader(prefix, rms_grads_every)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Refuses an optimizer without metrics."""
        if find_metrics_source(optimizer) is None:
            raise no_metrics(optimizer)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Adds metrics to the logs of training, which have a loss, but not to those of evaluation."""
        source = find_metrics_source(optimizer)
        if source is None or logs is None or "loss" not in logs:
            return
        metrics = self._reader.read([source], state.global_step)
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)  # Trainer wrote this entry before it called


def log_metrics(trainer: Trainer, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
    """Makes a Trainer log the optimizer's metrics, to TensorBoard, W&B and all else that it reports to.

    Example:
        >>> trainer = Trainer(model, args, optimizers=(optimizer, None), ...)
        >>> log_metrics(trainer)
        >>> trainer.train()
    """
    trainer.callback_handler.callbacks.insert(0, MetricsCallback(prefix, rms_grads_every))
