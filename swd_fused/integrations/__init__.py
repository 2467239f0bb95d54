"""Callbacks that log `optimizer.metrics()` from other libraries' trainers, and the optimizers in timm's registry.

`swd_fused.integrations.transformers`, `lightning` and `timm` import those libraries; nothing else does.
"""
