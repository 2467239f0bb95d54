"""FusedAdamW: torch.optim.AdamW by the step of FusedAdamS."""

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

    Takes the place of `torch.optim.AdamW`: the arguments have the same names, order and defaults, `weight_decay` means
    the same, and state dicts go from one to the other. It is `FusedAdamS(decay="decoupled")`, whose documentation
    explains the arguments that torch's AdamW does not have.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: learning rate, a number or a tensor with one element.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: each step removes `lr * weight_decay` of a weight.
        amsgrad: use the largest second moment so far.
        maximize: ascend instead of descend.
        max_grad_norm: clip the gradients' global norm within the step. `param.grad` is left as it is.
        skip_nonfinite: a step whose gradient norm is not finite changes nothing and is counted in `skipped_steps`.
        outliers: "skip" steps whose gradient norm stands out from the recent ones, or "clip" their gradients.
        outlier_sigma: by how many standard deviations a norm stands out.
        corrected_decay: AdamC's: multiply the decay by lr / largest lr.
        cautious_decay: decay only weights that the update does not move away from zero.
        largest_lr: the learning rate's peak, for `corrected_decay`. None is the largest so far.
        master_weights: update float32 masters of 16-bit parameters.
        stochastic_rounding: round bfloat16 parameters up or down stochastically.
        seed: of stochastic rounding.
        state_dtype: "8bit" keeps both moments in 8 bits; a dtype of 16 bits is for the first moment only.
        ema_decay: keep an exponential average of the weights, for `averaged_params` and `copy_averages`.
        ema_warmup: let it forget the first weights soon, by a smaller `ema_decay` at first.
        process_group: the ranks to sum over, where plain tensors are shards or differ by rank.
        total_numel: number of elements of the whole model, where shards are padded.
        backend: "cpu" (C++), "triton" (CUDA, ROCm), "torch" (any device), or "auto", the best.
        compatibility: `fused`, `foreach`, `capturable` and others, see `swd_fused.options.Compatibility`.
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
