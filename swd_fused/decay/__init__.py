"""Weight decay: its kinds, calibration in AdamW's terms, the warning, and loading."""

from swd_fused.decay.kinds import columns, decay_factor, effective_decay, follow_lr, harmless_mean

__all__ = ["columns", "decay_factor", "effective_decay", "follow_lr", "harmless_mean"]
