"""Logs `optimizer.metrics()` with Lightning."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from swd_fused.integrations import find_metrics_source, no_metrics


class MetricsCallback(Callback):
    """Sends the optimizer's metrics to the trainer's loggers, every `log_every_n_steps` steps.

    Args:
        prefix: what the names start with. With several optimizers that have metrics their number follows.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[MetricsCallback()])
    """

    def __init__(self, prefix: str = "adams/") -> None:
        self.prefix = prefix
        self._last_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses to train without an optimizer that has metrics, and with clipping that Lightning would refuse."""
        if not any(find_metrics_source(optimizer) for optimizer in trainer.optimizers):
            raise no_metrics(next(iter(trainer.optimizers), None))
        _check_clipping(trainer)
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs after a step whose number is due; batches that only accumulate gradients take none."""
        step = trainer.global_step
        if step == self._last_step or not trainer.loggers:
            return
        due = step // trainer.log_every_n_steps > self._last_step // trainer.log_every_n_steps
        self._last_step = step
        if due:
            metrics = self._metrics(trainer.optimizers)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step - 1)  # Lightning counts the first step as 0

    def _metrics(self, optimizers: list[Any]) -> dict[str, float]:
        sources = list(filter(None, map(find_metrics_source, optimizers)))
        named = [(self.prefix if len(sources) == 1 else f"{self.prefix}{i}/", one) for i, one in enumerate(sources)]
        return {f"{prefix}{name}": value for prefix, one in named for name, value in one.metrics().items()}


def _check_clipping(trainer: Any) -> None:
    """Says what to do about what Lightning only says is not allowed, and after the first backward pass."""
    is_mixed = any(cls.__name__ == "MixedPrecision" for cls in type(trainer.precision_plugin).__mro__)
    if is_mixed and trainer.gradient_clip_val:
        raise ValueError(
            f"lightning.Trainer got gradient_clip_val={trainer.gradient_clip_val:g} with mixed precision, which it "
            "refuses for optimizers that unscale gradients in their step. Leave it out, and let the step clip: "
            f"FusedAdamS(..., max_grad_norm={trainer.gradient_clip_val:g})."
        )
