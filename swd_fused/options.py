"""What holds for an optimizer as a whole and for all of its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

DECAYS = ("scheduled", "decoupled", "l2")

# The state's key of master weights; TransformerEngine's is the same.
MASTER = "master_param"


class Options(NamedTuple):
    decay: str = "scheduled"  # one of DECAYS
    bias_correction: bool = True
    master_weights: bool = False
    rounding_seed: int | None = None  # of stochastic rounding, if that is asked for
    state_dtype: torch.dtype | None = None  # of the first moment; None: as the parameter, and 32 bits at least
    exp_avg_sq_dtype: torch.dtype | None = None  # likewise
    skip_nonfinite: bool = False

    def moment_dtype(self, key: str, param_dtype: torch.dtype) -> torch.dtype:
        """Never 16 bits unless asked for: a bfloat16 second moment stalls, since a thousandth of it is below its
        resolution."""
        return self._asked_for(key, param_dtype) or torch.promote_types(param_dtype, torch.float32)

    def kept_dtype(self, key: str, dtype: torch.dtype, param_dtype: torch.dtype) -> torch.dtype:
        """That of a moment which is there already: never narrower than it is, unless that was asked for."""
        return self._asked_for(key, param_dtype) or torch.promote_types(
            torch.promote_types(dtype, torch.float32), param_dtype
        )

    def needs_master(self, param_dtype: torch.dtype) -> bool:
        return self.master_weights and param_dtype in (torch.bfloat16, torch.float16)

    def _asked_for(self, key: str, param_dtype: torch.dtype) -> torch.dtype | None:
        """Complex and float64 parameters keep moments of their own precision."""
        if param_dtype.is_complex or param_dtype == torch.float64:
            return None
        return self.state_dtype if key == "exp_avg" else self.exp_avg_sq_dtype
