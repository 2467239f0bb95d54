"""The same short training for an optimizer and for the definition, and how far they are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from swd_fused import FusedAdamS
from swd_fused.decay.observers import DecayWarning
from tests.definition import AdamS, Group
from tests.device import DEVICE

SHAPES = [(257,), (31, 17), (), (0,), (3, 5, 7), (5000,)]

# For the interpreter, which takes milliseconds for each block: whole blocks, tails and several segments all the same.
SMALL_SHAPES = [(257,), (31, 17), (), (0,), (3, 5, 7), (1300,)]

# Two groups that differ in everything, one of them without decay.
GROUPS = [
    {"params": [0, 1, 2], "lr": 1e-2, "weight_decay": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8},
    {"params": [3, 4, 5], "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
]


def is_interpreted(backend: str) -> bool:
    return backend == "triton" and DEVICE == "cpu"


def shapes_for(backend: str) -> list[tuple[int, ...]]:
    return SMALL_SHAPES if is_interpreted(backend) else SHAPES


def steps_for(backend: str, steps: int) -> int:
    return min(steps, 4) if is_interpreted(backend) else steps


def sum_tolerance(backend: str, in_float64: float = 1e-12) -> float:
    """Returns how far sums over the same tensors may be apart, relatively, in other passes or by other parts. On a GPU
    the threads of the Triton backend add in float32, each time other elements."""
    return 1e-7 if backend == "triton" and DEVICE != "cpu" else in_float64


def random_params(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]


def random_grads(shapes: list[tuple[int, ...]], steps: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Gradients whose size differs by tensor and falls over time, so that no wrong mean looks right."""
    scales = [10.0 ** -(i % 3) for i in range(len(shapes))]
    return [
        [
            (torch.randn(shape, dtype=torch.float64) * scale / (1 + t / 10)).to(dtype)
            for shape, scale in zip(shapes, scales, strict=True)
        ]
        for t in range(steps)
    ]


def to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy().astype(np.longdouble)


def set_grads(params: list[torch.nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()


def twins_of(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def run(params: list[torch.nn.Parameter], grads: list[list[Tensor | None]], optimizer: torch.optim.Optimizer) -> None:
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    if isinstance(optimizer, FusedAdamS):
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        for observer in optimizer._stepper.concerned:  # as the next step would
            if observer.is_due and isinstance(observer, DecayWarning):
                observer.speak(optimizer.param_groups)


def fused(params: list[torch.nn.Parameter], groups: list[dict[str, Any]] = GROUPS, **options: Any) -> FusedAdamS:
    return FusedAdamS([{**group, "params": [params[i] for i in group["params"]]} for group in groups], **options)


def defined(
    params: list[torch.nn.Parameter],
    grads: list[list[Tensor | None]],
    groups: list[dict[str, Any]] = GROUPS,
    definition: Callable[..., AdamS] = AdamS,
    max_grad_norm: float | None = None,
    lagged: bool = False,
    **options: Any,
) -> AdamS:
    """The definition's result from the same start: call it before the parameters are trained."""
    reference = definition(
        [to_numpy(p) for p in params],
        [Group(**{**options, **group}) for group in groups],
        max_grad_norm,
        lagged=lagged,
    )
    for step_grads in grads:
        reference.step([None if grad is None else to_numpy(grad) for grad in step_grads])
    return reference


def error(tensors: list[Tensor], references: list[np.ndarray]) -> float:
    """Root mean square error over all elements."""
    squares = [(to_numpy(t) - r) ** 2 for t, r in zip(tensors, references, strict=True)]
    return float(np.sqrt(sum(s.sum() for s in squares) / sum(s.size for s in squares)))


def moments(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], key: str) -> list[Tensor]:
    return [optimizer.state[param][key] for param in params]


def assert_same(one: Any, other: Any) -> None:
    """Compares to the bit. Groups may have strings and dtypes, of which torch's comparison knows nothing."""
    pair = [tree_map_only((str, torch.dtype), hash, nested) for nested in (one, other)]
    torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)


def everything(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> list[Tensor]:
    """Returns copies of the parameters and of their state."""
    state = [value for param in params for value in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*params, *state)]
