"""Logs `optimizer.metrics()` with Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from swd_fused.integrations import find_metrics_source, no_metrics
from swd_fused.rms_grads import EVERY


class MetricsCallback(TrainerCallback):
    """Adds the optimizer's metrics to what Trainer logs beside the loss, at the `logging_steps`.

    Attach it by `log_metrics(trainer)`. Passed as `Trainer(callbacks=[MetricsCallback()])` it comes after the callbacks
    for TensorBoard, W&B and the like, which then have no metrics.

    Args:
        prefix: what the names start with. Trainer has a "grad_norm" of its own.
        rms_grads_every: also log `optimizer.rms_grads()`, at the first `logging_steps` after every so many steps.
    """

    def __init__(self, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
        EVERY.require("rms_grads_every", rms_grads_every)
        self.prefix, self.rms_grads_every = prefix, rms_grads_every
        self._last_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Refuses an optimizer without metrics."""
        if find_metrics_source(optimizer) is None:
            raise no_metrics(optimizer)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Adds metrics to the logs of training, which have a loss, but not to those of evaluation."""
        source = find_metrics_source(optimizer)
        if source is None or logs is None or "loss" not in logs:
            return
        metrics = {f"{self.prefix}{name}": value for name, value in source.metrics().items()}
        every, step, last = self.rms_grads_every, state.global_step, self._last_step
        if every is not None and step // every > last // every:
            metrics.update({f"{self.prefix}rms_grad/{name}": value for name, value in source.rms_grads().items()})
        self._last_step = step
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
