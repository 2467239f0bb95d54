"""Adapter for DeepSpeed's ZeRO, which steps one flat shard after another: the engine's norm is passed to FusedAdamS."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from swd_fused.distributed.sharding import ShardedOver


def follow(engine: Any) -> None:
    """Makes FusedAdamS take the gradients' norm from a DeepSpeed engine. Call it once, after `deepspeed.initialize`.

    Clipping is the engine's: `gradient_clipping` in its config.
    """
    from swd_fused.optimizer import FusedAdamS

    zero = engine.optimizer
    optimizer = getattr(zero, "optimizer", None)
    if not isinstance(optimizer, FusedAdamS) or not hasattr(zero, "_global_grad_norm"):
        raise TypeError(
            f"follow got an engine whose optimizer is {type(zero).__name__} around {type(optimizer).__name__}, wanted "
            "ZeRO stage 1, 2 or 3 around FusedAdamS. Without ZeRO there is nothing to follow."
        )
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            f"follow got max_grad_norm={optimizer.max_grad_norm}, wanted None: the engine clips. "
            'Put "gradient_clipping" into its config.'
        )
    params = [param for param in engine.module.parameters() if param.requires_grad]
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in params)

    def sum_and_count() -> tuple[float | Tensor, int]:
        """Returns grad_sumsq and numel. The engine's norm is from before its clipping, so it is clipped here."""
        norm = zero._global_grad_norm
        if zero.clip_grad > 0:
            norm = norm / max(1.0, (norm + 1e-6) / zero.clip_grad)
        return norm**2, numel

    optimizer.sum_over(ShardedOver(zero.dp_process_group))
    optimizer.grad_sumsq_provider = sum_and_count
