"""Logs `optimizer.metrics()` with Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from swd_fused.integrations import passes, read_metrics


class MetricsCallback(TrainerCallback):
    """Adds the optimizer's metrics to what Trainer logs beside the loss. Attach it by `log_metrics`."""

    def __init__(self, prefix: str, rms_grads_every: int | None) -> None:
        self._prefix, self._every, self._last_logged = prefix, rms_grads_every, 0

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Adds metrics to the logs of training, which have a loss, but not to those of evaluation."""
        if logs is None or "loss" not in logs:
            return
        metrics = read_metrics([optimizer], self._prefix, passes(self._last_logged, state.global_step, self._every))
        self._last_logged = state.global_step
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)  # Trainer wrote this entry before it called


def log_metrics(trainer: Trainer, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
    """Makes a Trainer log the optimizer's metrics, to TensorBoard, W&B and all else that it reports to.

    They come at the `logging_steps`, under names that start with `prefix`: Trainer has a "grad_norm" of its own.
    With `rms_grads_every` the first of them after every so many steps include `optimizer.rms_grads()`.

    Example:
        >>> trainer = Trainer(model, args, optimizers=(optimizer, None), ...)
        >>> log_metrics(trainer)
        >>> trainer.train()
    """
    # Before the callbacks for TensorBoard, W&B and the like: else they would have no metrics.
    trainer.callback_handler.callbacks.insert(0, MetricsCallback(prefix, rms_grads_every))
