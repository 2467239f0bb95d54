"""AdamW and AdamS (Adam with scheduled weight decay; Xie et al., NeurIPS 2023) as one fused step."""

import sys
import warnings

# While Python locates the module of `python -m swd_fused`, the first argument is "-m", and this file imports torch. If
# NumPy is missing, which this package does not use, torch would print a warning above the report.
if sys.argv[:1] == ["-m"]:
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")

from swd_fused.adamw import FusedAdamW
from swd_fused.optimizer import FusedAdamS
from swd_fused.param_groups import param_groups
from swd_fused.version import __version__

__all__ = ["FusedAdamS", "FusedAdamW", "__version__", "param_groups"]
