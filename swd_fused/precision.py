"""Checks of what users ask for in mixed precision: contradictions are refused, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swd_fused.options import Options

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_precision(
    master_weights: bool,
    stochastic_rounding: bool,
    seed: int,
    state_dtype: torch.dtype | None,
    exp_avg_sq_dtype: torch.dtype | None,
) -> None:
    for name, flag in (("master_weights", master_weights), ("stochastic_rounding", stochastic_rounding)):
        if not isinstance(flag, bool):
            raise ValueError(f"FusedAdamS got {name}={flag!r}, wanted True or False.")
    if master_weights and stochastic_rounding:
        raise ValueError(
            "FusedAdamS got stochastic_rounding=True with master_weights=True: the masters keep what rounding would "
            "lose, so parameters are their nearest copies. Use one of the two."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"FusedAdamS got seed={seed!r}, wanted a whole number in [0, 2^63).")
    if seed and not stochastic_rounding:
        raise ValueError(f"FusedAdamS got seed={seed} without stochastic_rounding=True, which alone uses it.")
    for name, dtype in (("state_dtype", state_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
        if dtype is not None and dtype not in STATE_DTYPES:
            raise ValueError(f"FusedAdamS got {name}={dtype!r}, wanted one of {STATE_DTYPES} or None.")


def check_use_of_precision(options: Options, dtypes: Sequence[torch.dtype]) -> None:
    """That there is a parameter for which it makes a difference."""
    kinds = ", ".join(sorted({str(dtype) for dtype in dtypes}))
    if options.master_weights and not any(options.needs_master(dtype) for dtype in dtypes):
        raise ValueError(
            f"FusedAdamS got master_weights=True for parameters of {kinds}, wanted some of torch.bfloat16 or "
            "torch.float16: wider ones are their own masters. Convert the model before, or leave it out."
        )
    if options.rounding_seed is not None and torch.bfloat16 not in dtypes:
        raise ValueError(
            f"FusedAdamS got stochastic_rounding=True for parameters of {kinds}, wanted some of torch.bfloat16, which "
            "alone are rounded so. Convert the model before, or leave it out."
        )
