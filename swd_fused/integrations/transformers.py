"""Logs `optimizer.metrics()` with Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from swd_fused.integrations import passes, read_metrics


class MetricsCallback(TrainerCallback):
    """Adds the optimizer's metrics to the entries that Trainer logs with the loss. Attach it by `log_metrics`."""

    def __init__(self, prefix: str, rms_grads_every: int | None) -> None:
        self._prefix, self._every, self._last_logged = prefix, rms_grads_every, 0

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Adds metrics to the logs of training, which have a "loss", but not to those of evaluation."""
        if logs is None or "loss" not in logs:
            return
        metrics = read_metrics([optimizer], self._prefix, passes(self._last_logged, state.global_step, self._every))
        self._last_logged = state.global_step
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)  # Trainer wrote this entry before calling this


def log_metrics(trainer: Trainer, prefix: str = "adams/", rms_grads_every: int | None = None) -> None:
    """Makes a Trainer log the optimizer's metrics to TensorBoard, W&B and everything else that it reports to.

    Metrics are logged at the `logging_steps`. Their names start with `prefix`, since Trainer has a "grad_norm" too. The
    first entry after every `rms_grads_every` steps includes `optimizer.rms_grads()`.

    Example:
        >>> trainer = Trainer(model, args, optimizers=(optimizer, None), ...)
        >>> log_metrics(trainer)
        >>> trainer.train()
    """
    # First, since the callbacks for TensorBoard, W&B and the like must run after the metrics were added.
    trainer.callback_handler.callbacks.insert(0, MetricsCallback(prefix, rms_grads_every))
