"""AdamS, Adam with Scheduled Weight Decay (Xie et al., NeurIPS 2023), as one fused step."""

from swd_fused.optimizer import FusedAdamS
from swd_fused.paper.scheduled_weight_decay import ScheduledWeightDecay
from swd_fused.paper.sgds import SGDS
from swd_fused.param_groups import param_groups
from swd_fused.version import __version__

__all__ = ["SGDS", "FusedAdamS", "ScheduledWeightDecay", "__version__", "param_groups"]
