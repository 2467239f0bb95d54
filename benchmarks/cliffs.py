"""Looks for cliffs: layouts, shapes and values with which a step takes much longer than a plain one.

A plain step is that of one contiguous float32 matrix with rows of 1024 elements, or of another dtype and state. Each
case differs from it in one thing: how parameters or gradients lie in memory, their shape, or the gradients' values.
Its time is relative to the plain step of its own dtype and state, on as many elements, with which it takes turns. The
first row says how the states themselves compare, relative to AdamW fused in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.step_times.contenders import PEER, Step, adamw
from benchmarks.step_times.harness import Case, Row, carry_out, command, table
from benchmarks.step_times.pictures import CLIFF, plot_cliffs
from benchmarks.step_times.suites import Shape
from swd_fused import FusedAdamS

# The number of elements is a multiple of this, so that rows of each length, a convolution and small matrices can all
# have it: 2**12 for 64 x 64 and rows of 1024, 9 for 576 and 3 x 3, 11 for 264.
UNIT = 2**12 * 9 * 11
UNITS = 10  # 4,055,040 elements
QUICK = 1, 3  # units and repeats
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

    def optimizer(self, params: Sequence[Tensor], schedule: str) -> FusedAdamS:
        return FusedAdamS(params, weight_decay=WEIGHT_DECAY, schedule=schedule, backend="cpu", **self.options)


# Two moments in 8 bits, read and written, and of each a float32 scale for each block of 256 elements.
CODED_BYTES = 2 * (1 + 1) + 2 * (4 + 4) / 256
CODED: dict[str, Any] = {"state_dtype": "8bit"}
MASTERS: dict[str, Any] = {"master_weights": True}
ROUNDED: dict[str, Any] = {"stochastic_rounding": True}

# Reads and writes of pass 2, as in csrc/cpu/chunks.h: the parameter, what else there is of its master, the gradient,
# both moments. Before it an exact step reads the gradients once (csrc/cpu/passes.cpp).
STATES = (
    State("float32", torch.float32, {}, (4 + 4) + 4 + 2 * (4 + 4), 4),
    # A master is the parameter and a remainder of two bytes.
    State("bfloat16 masters", torch.bfloat16, MASTERS, (2 + 2) + (2 + 2) + 2 + 2 * (4 + 4), 2),
    State("bfloat16 stochastic", torch.bfloat16, ROUNDED, (2 + 2) + 2 + 2 * (4 + 4), 2),
    # The parameter is written only, since its master of four bytes is what is read.
    State("float16 masters", torch.float16, MASTERS, 2 + (4 + 4) + 2 + 2 * (4 + 4), 2),
    State("float64", torch.float64, {}, (8 + 8) + 8 + 2 * (8 + 8), 8),
    State("8 bits", torch.float32, CODED, (4 + 4) + 4 + CODED_BYTES, 4),
    State("8 bits bfloat16", torch.bfloat16, {**CODED, **ROUNDED}, (2 + 2) + 2 + CODED_BYTES, 2),
    # A third moment. Its next sum takes one more pass, over gradients, second moments and maxima.
    State("amsgrad", torch.float32, {"amsgrad": True}, (4 + 4) + 4 + 3 * (4 + 4), 4 + (4 + 4 + 4)),
)


# --- Layouts, shapes and values


class Source:
    """Numbers of one dtype that parameters are made of: drawn once, since drawing takes longer than ten steps."""

    def __init__(self, dtype: torch.dtype, units: int) -> None:
        self.dtype, self.elements = dtype, units * UNIT
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


source_of = lru_cache(maxsize=2)(Source)
Memory = Callable[[Shape, torch.dtype], Tensor]
Make = Callable[[Source], list[Tensor]]


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


def laid_out(shape: str, of_param: Memory, of_grad: Memory | None = None) -> Make:
    """Makes one parameter of the shape that a Source has by this name."""

    def make(source: Source) -> list[Tensor]:
        own: Shape = getattr(source, shape)
        weights = filled(of_param, own, source.weights)
        return [with_gradient(weights, filled(of_grad or of_param, own, source.grads))]

    return make


def in_rows_of(columns: int) -> Make:
    """Makes one matrix with rows of so many elements; of all of them for 0."""

    def make(source: Source) -> list[Tensor]:
        shape = source.elements // (columns or source.elements), columns or source.elements
        return [with_gradient(*(filled(plain, shape, values) for values in (source.weights, source.grads)))]

    return make


def many_small(source: Source) -> list[Tensor]:
    pairs = zip(source.weights.view(-1, *SMALL), source.grads.view(-1, *SMALL), strict=True)
    return [with_gradient(weights.clone(), grad.clone()) for weights, grad in pairs]


def with_grads(change: Callable[[Tensor], object]) -> Make:
    def make(source: Source) -> list[Tensor]:
        (param,) = MATRIX(source)
        change(param.grad)  # type: ignore[arg-type]
        return [param]

    return make


MATRIX = laid_out("matrix", plain)
TINY_GRADIENTS = f"gradients of {TINY:g}"

# By what differs from the plain matrix.
FACTORS: dict[str, dict[str, Make]] = {
    "layout": {
        "transposed": laid_out("matrix", transposed),
        "channels_last 3x3": laid_out("convolution", channels_last),
        "channels_last 1x1": laid_out("pointwise", channels_last),
        "parameter with gaps": laid_out("matrix", every_second, plain),
        "gradient expanded in rows": laid_out("matrix", plain, same_in_rows),
        "gradient expanded in columns": laid_out("matrix", plain, same_in_columns),
        "gradient transposed": laid_out("matrix", plain, transposed),
        "channels_last 3x3, gradient plain": laid_out("convolution", channels_last, plain),
    },
    "shape": {
        **{f"rows of {columns}": in_rows_of(columns) for columns in ROWS},
        "one row": in_rows_of(0),
        "many of 64 x 64": many_small,
    },
    "values": {
        "gradients of zero": with_grads(lambda grad: grad.zero_()),
        TINY_GRADIENTS: with_grads(lambda grad: grad.fill_(TINY)),
        "every second row zero": with_grads(lambda grad: grad[::2].zero_()),
    },
}
NAMES = [name for makes in FACTORS.values() for name in makes]


def exists_in(name: str, dtype: torch.dtype) -> bool:
    """Returns whether gradients of this dtype can have these values: float16 ends at 6e-8."""
    return not (name == TINY_GRADIENTS and dtype == torch.float16)


# --- The cells of the table


def cell_of(state: State, factor: str, name: str, make: Make, schedule: str, units: int, limits: Row) -> Case:
    """Compares a case with the plain step of its state, and the plain step with AdamW's in float32."""

    def build() -> Mapping[str, Step]:
        source = source_of(state.dtype, units)
        own = state.optimizer(make(source), schedule).step
        if factor == "plain":
            return {name: own, f"{PEER}, float32": adamw(MATRIX(source_of(torch.float32, units)))}
        return {name: own, "plain": state.optimizer(MATRIX(source), schedule).step}

    columns: Row = {
        "factor": factor,
        "case": name,
        "state": state.name,
        "dtype": str(state.dtype).removeprefix("torch."),
    }
    columns |= {"schedule": schedule, "elements": units * UNIT}
    columns["bytes_per_element"] = state.bytes_per_element(schedule)
    peer = f"{PEER}, float32" if factor == "plain" else "plain"
    return Case(f"{state.name}, {name}", columns, build, peers={name: peer, peer: peer}, **limits)


def tables(rows: Sequence[Row]) -> list[Table]:
    states = list(dict.fromkeys(row["state"] for row in rows))
    own = {(row["case"], row["state"]): row for row in rows if row["contender"] == row["case"]}
    plain_rows = [own["plain", state] for state in states]
    cells = [
        ["bytes per element", *(f"{row['bytes_per_element']:.4g}" for row in plain_rows)],
        ["plain step, ms", *(f"{1e3 * row['median_s']:.2f}" for row in plain_rows)],
    ]
    for name in ("plain", *(name for name in NAMES if any((name, state) in own for state in states))):
        ratios = (own[name, state]["ratio"] if (name, state) in own else None for state in states)
        cells.append([name, *("" if r is None else f"[bold red]{r:.2f}" if r > CLIFF else f"{r:.2f}" for r in ratios)])
    first = rows[0]
    title = f"Steps relative to the plain one, {first['schedule']} schedule, {first['elements']:,} elements"
    caption = f"plain: relative to {PEER} in float32. Red: above {CLIFF:g}."
    headings = ["case", *(state.replace(" ", "\n") for state in states)]
    return [table(title, headings, cells, caption)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("cliffs", __doc__, repeats=9, threads=torch.get_num_threads())
    parser.add_argument("--schedule", choices=("exact", "lagged"), default="exact", help="default: %(default)s")
    named = {"action": "append", "metavar": "TEXT", "help": "those with TEXT in their name; repeatable; default: all"}
    parser.add_argument("--state", **named)
    parser.add_argument("--case", **named)
    parser.add_argument("--budget", type=float, default=0.8, help="seconds of one cell; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small tensors and few repeats: does everything run?")
    options = parser.parse_args(arguments)
    states = [state for state in STATES if any(text in state.name for text in options.state or [""])]
    names = [name for name in NAMES if any(text in name for text in options.case or [""])]
    if not states or not names:
        parser.error(f"no such state or case: {'; '.join([*(state.name for state in STATES), *NAMES])}")
    units, repeats = QUICK if options.quick else (UNITS, options.repeats)
    limits = {"repeats": repeats, "budget": options.budget}
    cells = [
        cell_of(state, factor, name, make, options.schedule, units, limits)
        for state in states
        for factor, makes in {"plain": {"plain": MATRIX}, **FACTORS}.items()
        for name, make in makes.items()
        if name in ("plain", *names) and exists_in(name, state.dtype)
    ]
    carry_out("cliffs", cells, options.out, tables, plot_cliffs, options.threads)


if __name__ == "__main__":
    main()
