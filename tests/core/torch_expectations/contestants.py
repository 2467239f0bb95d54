"""AdamW and FusedAdamS under one signature: what AdamW does not meet is no expectation of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from swd_fused import FusedAdamS, FusedAdamW

Make = Callable[..., torch.optim.Optimizer]


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"weight_decay": 5e-4, **options})


def by_cpp(params: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedAdamS(params, **{"backend": "cpu", **options})


def by_torch(params: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedAdamS(params, **{"backend": "torch", **options})


def by_fused_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedAdamW(params, **options)


CONTESTANTS = [
    pytest.param(adamw, id="AdamW", marks=pytest.mark.slow),  # whether these are torch's expectations
    pytest.param(by_cpp, id="cpu"),
    pytest.param(by_torch, id="torch"),
    pytest.param(by_fused_adamw, id="FusedAdamW"),
]
contestants = pytest.mark.parametrize("make", CONTESTANTS)

# The constructor's arguments that torch's generic tests go through for Adam.
CONFIGS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01},
    {"weight_decay": 0.01},
    {"weight_decay": 0.01, "maximize": True},
    {"weight_decay": 0.01, "amsgrad": True},
    {"lr": torch.tensor(0.01)},
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


def fresh(config: dict[str, Any]) -> dict[str, Any]:
    """With tensors of its own: schedulers write to them."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in config.items()}


def params_like(
    *shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def set_grads(params: list[torch.nn.Parameter], seed: int) -> None:
    for param, grad in zip(params, params_like(*(p.shape for p in params), seed=seed), strict=True):
        param.grad = grad.detach().to(param.dtype)


def train(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, seed: int = 100) -> None:
    for step in range(steps):
        set_grads(params, seed + step)
        optimizer.step()


def copies(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def assert_same(one: Any, other: Any) -> None:
    """Compares to the bit. State dicts may have strings in their groups, of which torch's comparison knows nothing."""
    pair = [tree_map_only(str, hash, nested) for nested in (one, other)]
    torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
