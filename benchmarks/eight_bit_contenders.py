"""Optimizers with moments in 8 bits, their float32 references, and what each of them stores of the second moment.

AdamS: FusedAdamS, and AdamS in plain PyTorch around other ways to store moments: bitsandbytes' dynamic map, and the
codes of state_dtype="8bit" rounded otherwise. AdamW: torch's, and that of the packages bitsandbytes and torchao.

The dynamic map is emulated from its paper although bitsandbytes runs on a CPU too: its quantiser for the CPU (0.50.2)
turns 0 and all that is below 1e-5 of a block's largest value into 1.6e-5 of it, where the nearest value of its map is 0
or close to it. So small second moments are larger there than on a GPU, and updates smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from swd_fused import FusedAdamS

BETAS = (0.9, 0.999)
EPS = 1e-8
MAX_DECAY = 0.1
BLOCK = 256
LEAST_NUMEL = 4096  # bitsandbytes, torchao and FusedAdamS leave smaller tensors in float32

Decays = tuple[float, float]  # AdamS's and AdamW's
Optimizer = Any  # some have no common base class
Rounding = Callable[[Tensor], Tensor]  # of codes


@dataclass(frozen=True)
class Contender:
    """`second_moment` reads what the optimizer stores for a parameter. `reference` is the contender in float32."""

    name: str
    reference: str
    build: Callable[[Sequence[Tensor], Decays], Optimizer]
    second_moment: Callable[[Optimizer, Tensor], Tensor]
    package: str | None = None
    by_default: bool = True
    move_start: float = 0.0

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


# --- How moments are stored: functions that return what is read back


@lru_cache
def dynamic_map(signed: bool) -> Tensor:
    """Returns the 256 values of "8-bit Optimizers via Block-wise Quantization" (Dettmers and others, 2021).

    Seven decades below 1, each with twice as many values as the one below it, then 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + [-middle for middle in middles if signed]
    return torch.tensor(sorted(values), dtype=torch.float32)


def in_blocks(values: Tensor, rows: int) -> Tensor:
    matrix = values.reshape(rows, -1)
    return pad(matrix, (0, -matrix.shape[1] % BLOCK)).view(rows, -1, BLOCK)


def out_of_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    rows = blocks.shape[0]
    return blocks.view(rows, -1)[:, : like.numel() // rows].reshape(like.shape)


def through_dynamic_map(values: Tensor, signed: bool) -> Tensor:
    """Blocks are of the tensor as one row, and each value becomes the nearest one of the map."""
    codes = dynamic_map(signed)
    blocks = in_blocks(values, rows=1)
    largest = blocks.abs().amax(-1, keepdim=True)
    nearest = torch.bucketize(blocks / largest.clamp_min(1e-38), (codes[1:] + codes[:-1]) / 2)
    return out_of_blocks(codes[nearest] * largest, values)


def to_nearest(codes: Tensor) -> Tensor:
    return codes.round()


def at_random(codes: Tensor) -> Tensor:
    """The mean of what is stored is what was given."""
    return (codes + torch.rand_like(codes)).floor()


def at_random_by_square(codes: Tensor) -> Tensor:
    """The mean of the squares of what is stored is the square of what was given."""
    below = codes.floor()
    return below + (torch.rand_like(codes) < (codes.square() - below.square()) / (2 * below + 1))


def through_linear_codes(values: Tensor, largest_code: int, least_code: int, rounded: Rounding) -> Tensor:
    blocks = in_blocks(values, rows=values.shape[0] if values.dim() > 1 else 1)
    scales = blocks.abs().amax(-1, keepdim=True) / largest_code
    codes = rounded(blocks / scales.clamp_min(1e-38))
    return out_of_blocks(codes.clamp(least_code, largest_code) * scales, values)


def through_signed_codes(values: Tensor, rounded: Rounding) -> Tensor:
    return through_linear_codes(values, 127, -127, rounded)


def through_codes_of_root(values: Tensor, rounded: Rounding) -> Tensor:
    return through_linear_codes(values.sqrt(), 255, 1, rounded).square()


class PlainAdamS(torch.optim.Optimizer):
    """AdamS by its definition, one group. The update uses the moments before they are stored."""

    def __init__(
        self,
        params: Iterable[Tensor],
        weight_decay: float,
        store_exp_avg: Callable[[Tensor], Tensor],
        store_exp_avg_sq: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": weight_decay})
        self.store_exp_avg, self.store_exp_avg_sq = store_exp_avg, store_exp_avg_sq
        self.steps = 0
        self.exp_avg_sq_mean = math.nan

    def effective_weight_decay(self) -> list[float]:
        (group,) = self.param_groups
        decay = group["weight_decay"] / (math.sqrt(self.exp_avg_sq_mean) + EPS)
        return [min(decay, MAX_DECAY / group["lr"])]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        (group,) = self.param_groups
        (beta1, beta2), lr = BETAS, group["lr"]
        correction1, correction2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        total = 0.0
        for param in group["params"]:
            state = self.state[param]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["exp_avg"].lerp_(param.grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
            total += float(state["exp_avg_sq"].sum(dtype=torch.float64))
        self.exp_avg_sq_mean = total / correction2 / sum(param.numel() for param in group["params"])
        decay_factor = 1 - lr * self.effective_weight_decay()[0]
        for param in group["params"]:
            state = self.state[param]
            denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(EPS)
            param.mul_(decay_factor).addcdiv_(state["exp_avg"], denominator, value=-lr / correction1)
            if param.numel() >= LEAST_NUMEL:
                state["exp_avg"] = self.store_exp_avg(state["exp_avg"])
                state["exp_avg_sq"] = self.store_exp_avg_sq(state["exp_avg_sq"])


# --- What is stored of the second moment


def plain(optimizer: Optimizer, param: Tensor) -> Tensor:
    stored: Tensor = optimizer.state[param]["exp_avg_sq"]
    return stored


def of_fused_adams(optimizer: Optimizer, param: Tensor) -> Tensor:
    state = optimizer.state[param]
    if "exp_avg_sq_root_codes" not in state:
        return plain(optimizer, param)
    codes, scales = state["exp_avg_sq_root_codes"], state["exp_avg_sq_root_scales"]
    rows = codes.shape[0] if codes.dim() > 1 else 1
    return out_of_blocks(in_blocks(codes.float(), rows) * scales.reshape(rows, -1, 1), codes).square()


def of_bitsandbytes(optimizer: Optimizer, param: Tensor) -> Tensor:
    state = optimizer.state[param]
    if state["state2"].dtype != torch.uint8:
        stored: Tensor = state["state2"]
        return stored
    codes = in_blocks(state["qmap2"][state["state2"].long()], rows=1)
    return out_of_blocks(codes * state["absmax2"].view(1, -1, 1), param)


def of_torchao(optimizer: Optimizer, param: Tensor) -> Tensor:
    stored = plain(optimizer, param)
    return stored.dequantize() if hasattr(stored, "codes") else stored


# --- The optimizers


def fused_adams(params: Sequence[Tensor], decays: Decays, **options: Any) -> Optimizer:
    return FusedAdamS(params, betas=BETAS, eps=EPS, weight_decay=decays[0], max_decay=MAX_DECAY, **options)


def adams_stored(
    store_exp_avg: Callable[[Tensor], Tensor], store_exp_avg_sq: Callable[[Tensor], Tensor]
) -> Callable[[Sequence[Tensor], Decays], Optimizer]:
    return lambda params, decays: PlainAdamS(params, decays[0], store_exp_avg, store_exp_avg_sq)


def codes_rounded(exp_avg: Rounding, exp_avg_sq: Rounding) -> Callable[[Sequence[Tensor], Decays], Optimizer]:
    return adams_stored(
        partial(through_signed_codes, rounded=exp_avg), partial(through_codes_of_root, rounded=exp_avg_sq)
    )


def adamw(params: Sequence[Tensor], decays: Decays) -> Optimizer:
    return torch.optim.AdamW(params, betas=BETAS, eps=EPS, weight_decay=decays[1], fused=True)


def bitsandbytes_adamw(params: Sequence[Tensor], decays: Decays) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, betas=BETAS, eps=EPS, weight_decay=decays[1], min_8bit_size=LEAST_NUMEL)


def torchao_adamw(params: Sequence[Tensor], decays: Decays) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, betas=BETAS, eps=EPS, weight_decay=decays[1])


ADAMS = "FusedAdamS float32"
EIGHT_BIT = "FusedAdamS 8bit"
MOVED = "FusedAdamS float32, start moved by 1e-6"
ADAMW = "AdamW fused"

CONTENDERS = (
    Contender(ADAMS, ADAMS, fused_adams, of_fused_adams),
    Contender(EIGHT_BIT, ADAMS, partial(fused_adams, state_dtype="8bit"), of_fused_adams),
    # What a difference between two runs means: rounding alone grows to this.
    Contender(MOVED, ADAMS, fused_adams, of_fused_adams, move_start=1e-6),
    Contender(
        "AdamS, dynamic map of bitsandbytes",
        ADAMS,
        adams_stored(partial(through_dynamic_map, signed=True), partial(through_dynamic_map, signed=False)),
        plain,
    ),
    Contender(ADAMW, ADAMW, adamw, plain),
    Contender("bitsandbytes AdamW8bit", ADAMW, bitsandbytes_adamw, of_bitsandbytes, package="bitsandbytes"),
    Contender("torchao AdamW8bit", ADAMW, torchao_adamw, of_torchao, package="torchao"),
    *(
        Contender(f"AdamS, codes of 8bit, {name}", ADAMS, codes_rounded(*rounding), plain, by_default=False)
        for name, rounding in (
            ("both at random", (at_random, at_random)),
            ("m to nearest, v at random", (to_nearest, at_random)),
            ("m at random, v at random by its square", (at_random, at_random_by_square)),
            ("both to nearest", (to_nearest, to_nearest)),
        )
    ),
)


def by_name(name: str) -> Contender:
    return next(contender for contender in CONTENDERS if contender.name == name)
