"""FusedAdamW: torch.optim.AdamW, computed by FusedAdamS's step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from swd_fused.optimizer import FusedAdamS
from swd_fused.options import BackendName, Compatibility, Outliers, StateDtype


class FusedAdamW(FusedAdamS):
    """AdamW as one fused step, with gradient clipping inside it.

    It replaces `torch.optim.AdamW`: the arguments have the same names, order and defaults, `weight_decay` means the
    same, and each loads the other's state dicts. It is `FusedAdamS(decay="decoupled")`, whose documentation explains
    the other arguments.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: learning rate, a number or a tensor with one element.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: each step removes `lr * weight_decay` of a weight.
        amsgrad: use the largest second moment so far.
        maximize: ascend instead of descend.
        compatibility: torch's `foreach`, `capturable`, `differentiable` and `fused`, and keywords of apex's FusedAdam.
    """

    @_disable_dynamo
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        outliers: Outliers = None,
        outlier_sigma: float = 6.0,
        corrected_decay: bool = False,
        cautious_decay: bool = False,
        largest_lr: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state_dtype: StateDtype = None,
        ema_decay: float | None = None,
        ema_warmup: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
        total_numel: int | None = None,
        backend: BackendName = "auto",
        **compatibility: Unpack[Compatibility],
    ) -> None:
        arguments = {**locals(), **compatibility}
        for name in ("self", "__class__", "compatibility"):
            del arguments[name]
        super().__init__(**arguments, decay="decoupled")
