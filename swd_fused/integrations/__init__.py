"""Callbacks that log `optimizer.metrics()` from other libraries' trainers.

`swd_fused.integrations.transformers` and `swd_fused.integrations.lightning` import those libraries; nothing else does.
"""
