"""What benchmarks.cliffs steps: layouts, shapes and values of parameters and gradients, and states of an optimizer.

All cases have the same number of elements, so that caches treat a case and the plain matrix alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import Step
from benchmarks.suites import Shape
from swd_fused import FusedAdamS

# The number of elements is a multiple of this, so that rows of each length, a convolution and small matrices can all
# have it: 2**12 for 64 x 64 and rows of 1024, 9 for 576 and 3 x 3, 11 for 264.
UNIT = 2**12 * 9 * 11
COLUMNS = 1024
CONV_INPUTS = 704
SMALL: Shape = (64, 64)
ROWS = (16, 64, 72, 264, 576)
TINY = 1e-21  # its square is subnormal in float32

# Gradients of zero make the decay lr * weight_decay / eps. With this one it is 1e-7 of a weight in each step: weights
# stay what the plain step has, and nothing warns of too much decay.
WEIGHT_DECAY = 1e-12


# --- States


@dataclass(frozen=True)
class State:
    """A dtype of parameters and gradients, and options of FusedAdamS.

    What a step moves at least, in bytes per element of a plain matrix: `update_bytes` in pass 2, which is all of a
    lagged step, and `sum_bytes` in what an exact step reads before it.
    """

    name: str
    dtype: torch.dtype
    options: dict[str, Any] = field(hash=False)
    update_bytes: float
    sum_bytes: float

    def bytes_per_element(self, schedule: str) -> float:
        return self.update_bytes + (self.sum_bytes if schedule == "exact" else 0)

    def build(self, params: Sequence[Tensor], schedule: str) -> Step:
        return self.optimizer(params, schedule).step

    def optimizer(self, params: Sequence[Tensor], schedule: str) -> FusedAdamS:
        return FusedAdamS(params, weight_decay=WEIGHT_DECAY, schedule=schedule, backend="cpu", **self.options)


# Two moments in 8 bits, read and written, and of each a float32 scale for each block of 256 elements.
CODED_BYTES = 2 * (1 + 1) + 2 * (4 + 4) / 256

# Reads and writes of pass 2, as in csrc/cpu/chunks.h: the parameter, what else there is of its master, the gradient,
# both moments. Before it an exact step reads the gradients once (csrc/cpu/passes.cpp).
STATES = (
    State("float32", torch.float32, {}, (4 + 4) + 4 + 2 * (4 + 4), 4),
    # A master is the parameter and a remainder of two bytes.
    State("bfloat16 masters", torch.bfloat16, {"master_weights": True}, (2 + 2) + (2 + 2) + 2 + 2 * (4 + 4), 2),
    State("bfloat16 stochastic", torch.bfloat16, {"stochastic_rounding": True}, (2 + 2) + 2 + 2 * (4 + 4), 2),
    # The parameter is written only, since its master of four bytes is what is read.
    State("float16 masters", torch.float16, {"master_weights": True}, 2 + (4 + 4) + 2 + 2 * (4 + 4), 2),
    State("float64", torch.float64, {}, (8 + 8) + 8 + 2 * (8 + 8), 8),
    State("8 bits", torch.float32, {"state_dtype": "8bit"}, (4 + 4) + 4 + CODED_BYTES, 4),
    State(
        "8 bits bfloat16",
        torch.bfloat16,
        {"state_dtype": "8bit", "stochastic_rounding": True},
        (2 + 2) + 2 + CODED_BYTES,
        2,
    ),
    # A third moment. Its next sum takes one more pass, over gradients, second moments and maxima.
    State("amsgrad", torch.float32, {"amsgrad": True}, (4 + 4) + 4 + 3 * (4 + 4), 4 + (4 + 4 + 4)),
)


# --- Cases


class Source:
    """Numbers of one dtype that cases are made of: drawn once, since drawing takes longer than ten steps."""

    def __init__(self, dtype: torch.dtype, units: int) -> None:
        self.dtype, self.units, self.elements = dtype, units, units * UNIT
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(self.elements, generator=generator).to(dtype)
        # Of norm 1, as those of the other benchmarks. float16 has them with an accuracy of a hundredth.
        self.grads = torch.randn(self.elements, generator=generator).mul_(self.elements**-0.5).to(dtype)

    @property
    def matrix(self) -> Shape:
        return self.elements // COLUMNS, COLUMNS

    @property
    def convolution(self) -> Shape:
        return self.elements // (9 * CONV_INPUTS), CONV_INPUTS, 3, 3

    @property
    def pointwise(self) -> Shape:
        return (*self.matrix, 1, 1)


Memory = Callable[[Shape, torch.dtype], Tensor]


def plain(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def transposed(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape[::-1], dtype=dtype).t()


def channels_last(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)


def every_second(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]


def same_in_rows(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty((shape[0], 1), dtype=dtype).expand(shape)


def same_in_columns(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty((1, shape[1]), dtype=dtype).expand(shape)


def filled(memory: Memory, shape: Shape, values: Tensor) -> Tensor:
    result = memory(shape, values.dtype)
    own = tuple(slice(None) if stride else slice(1) for stride in result.stride())  # expanded: what there is of it
    result[own].copy_(values.view(shape)[own])
    return result


def with_gradient(weights: Tensor, grad: Tensor) -> Tensor:
    param = torch.nn.Parameter(weights)
    param.grad = grad
    return param


Make = Callable[[Source], list[Tensor]]


def laid_out(shape: str, of_param: Memory, of_grad: Memory | None = None) -> Make:
    """One parameter of the shape that a Source has by this name."""

    def make(source: Source) -> list[Tensor]:
        own: Shape = getattr(source, shape)
        weights = filled(of_param, own, source.weights)
        return [with_gradient(weights, filled(of_grad or of_param, own, source.grads))]

    return make


def in_rows_of(columns: int) -> Make:
    def make(source: Source) -> list[Tensor]:
        shape = source.elements // columns, columns
        return [with_gradient(*(filled(plain, shape, values) for values in (source.weights, source.grads)))]

    return make


def many_small(source: Source) -> list[Tensor]:
    pairs = zip(source.weights.view(-1, *SMALL), source.grads.view(-1, *SMALL), strict=True)
    return [with_gradient(weights.clone(), grad.clone()) for weights, grad in pairs]


def with_grads(change: Callable[[Tensor], object]) -> Make:
    def make(source: Source) -> list[Tensor]:
        (param,) = PLAIN.make(source)
        assert param.grad is not None
        change(param.grad)
        return [param]

    return make


@dataclass(frozen=True)
class Case:
    """`factor` is what differs from the plain matrix: its layout, its shape or its gradients' values."""

    factor: str
    name: str
    make: Make

    def exists_in(self, dtype: torch.dtype) -> bool:
        """Returns whether gradients of this dtype can have these values: float16 ends at 6e-8."""
        return not (self.name == TINY_GRADIENTS and dtype == torch.float16)


TINY_GRADIENTS = f"gradients of {TINY:g}"
PLAIN = Case("plain", "plain", laid_out("matrix", plain))
CASES = (
    Case("layout", "transposed", laid_out("matrix", transposed)),
    Case("layout", "channels_last 3x3", laid_out("convolution", channels_last)),
    Case("layout", "channels_last 1x1", laid_out("pointwise", channels_last)),
    Case("layout", "parameter with gaps", laid_out("matrix", every_second, plain)),
    Case("layout", "gradient expanded in rows", laid_out("matrix", plain, same_in_rows)),
    Case("layout", "gradient expanded in columns", laid_out("matrix", plain, same_in_columns)),
    Case("layout", "gradient transposed", laid_out("matrix", plain, transposed)),
    Case("layout", "channels_last 3x3, gradient plain", laid_out("convolution", channels_last, plain)),
    *(Case("shape", f"rows of {columns}", in_rows_of(columns)) for columns in ROWS),
    Case("shape", "one row", lambda source: in_rows_of(source.elements)(source)),
    Case("shape", "many of 64 x 64", many_small),
    Case("values", "gradients of zero", with_grads(lambda grad: grad.zero_())),
    Case("values", TINY_GRADIENTS, with_grads(lambda grad: grad.fill_(TINY))),
    Case("values", "every second row zero", with_grads(lambda grad: grad[::2].zero_())),
)


def cells(states: Sequence[State] = STATES) -> Iterator[tuple[State, Case]]:
    for state in states:
        for case in CASES:
            if case.exists_in(state.dtype):
                yield state, case
