"""Looks for cliffs: layouts, shapes and values with which a step takes much longer than a plain one.

A plain step is that of one contiguous matrix with rows of 1024 elements. Each case differs from it in one thing: how
parameters or gradients lie in memory, their shape, or the gradients' values. Its time is relative to the plain step of
its own dtype and state, on as many elements, with which it takes turns. The first row says how the states themselves
compare, relative to AdamW fused in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.step_times.contenders import PEER, adamw
from benchmarks.step_times.harness import Case, Row, Step, carry_out, command, crossed
from swd_fused import FusedAdamS

# The number of elements is a multiple of this, so that rows of each length, a convolution and small matrices can all
# have it: 2**12 for 64 x 64 and rows of 1024, 9 for 576 and 3 x 3, 11 for 264.
UNIT = 2**12 * 9 * 11
UNITS, QUICK_UNITS = 10, 1  # 4,055,040 elements
REPEATS, BUDGET = 9, 0.8  # seconds of a case
CLIFF = 2.0  # ratios above it are marked
TINY = 1e-21  # its square is subnormal in float32

# Gradients of zero make the decay lr * weight_decay / eps. With this one it is 1e-7 of a weight in each step: weights
# stay what the plain step has, and nothing warns of too much decay.
WEIGHT_DECAY = 1e-12


# --- States

CODED: dict[str, Any] = {"state_dtype": "8bit"}
MASTERS: dict[str, Any] = {"master_weights": True}
ROUNDED: dict[str, Any] = {"stochastic_rounding": True}


class State(NamedTuple):
    """A dtype of parameters and gradients, and options."""

    dtype: torch.dtype
    options: dict[str, Any]


FP32, BF16 = torch.float32, torch.bfloat16
STATES = {
    "float32": State(FP32, {}),
    "bfloat16 masters": State(BF16, MASTERS),
    "bfloat16 stochastic": State(BF16, ROUNDED),
    "float16 masters": State(torch.float16, MASTERS),
    "float64": State(torch.float64, {}),
    "8 bits": State(FP32, CODED),
    "8 bits bfloat16": State(BF16, {**CODED, **ROUNDED}),
    "amsgrad": State(FP32, {"amsgrad": True}),
}

# --- Layouts, shapes and values


class Source:
    """Numbers of one dtype that parameters are made of: drawn once, since drawing takes longer than ten steps."""

    def __init__(self, dtype: torch.dtype, units: int) -> None:
        generator, elements = torch.Generator().manual_seed(0), units * UNIT
        self.weights = torch.randn(elements, generator=generator).to(dtype)
        # Of norm 1, as those of the other benchmarks. float16 has them with an accuracy of a hundredth.
        self.grads = torch.randn(elements, generator=generator).mul_(elements**-0.5).to(dtype)


source_of = lru_cache(maxsize=2)(Source)
Memory = Callable[[Tensor], Tensor]
Make = Callable[[Source], list[Tensor]]


def transposed(values: Tensor) -> Tensor:
    return values.t().clone(memory_format=torch.contiguous_format).t()


def channels_last(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.channels_last)


def every_second(values: Tensor) -> Tensor:
    return values.repeat_interleave(2, -1)[..., ::2]


def same_in_rows(values: Tensor) -> Tensor:
    return values[:, :1].clone().expand_as(values)


def same_in_columns(values: Tensor) -> Tensor:
    return values[:1].clone().expand_as(values)


def with_gradient(weights: Tensor, grad: Tensor) -> Tensor:
    param = torch.nn.Parameter(weights)
    param.grad = grad
    return param


def laid_out(*shape: int, param: Memory = torch.clone, grad: Memory = torch.clone) -> Make:
    return lambda source: [with_gradient(param(source.weights.view(shape)), grad(source.grads.view(shape)))]


def many_small(source: Source) -> list[Tensor]:
    pairs = zip(source.weights.view(-1, 64, 64), source.grads.view(-1, 64, 64), strict=True)
    return [with_gradient(weights.clone(), grad.clone()) for weights, grad in pairs]


def half_of_the_rows(grads: Tensor) -> Tensor:
    return grads * (torch.arange(len(grads)) % 2)[:, None].to(grads.dtype)


TINY_GRADIENTS = f"gradients of {TINY:g}"
MATRIX, CONVOLUTION, POINTWISE = (-1, 1024), (-1, 704, 3, 3), (-1, 1024, 1, 1)
LAYOUTS: dict[str, Make] = {
    "plain": laid_out(*MATRIX),
    "transposed": laid_out(*MATRIX, param=transposed, grad=transposed),
    "channels_last 3x3": laid_out(*CONVOLUTION, param=channels_last, grad=channels_last),
    "channels_last 1x1": laid_out(*POINTWISE, param=channels_last, grad=channels_last),
    "parameter with gaps": laid_out(*MATRIX, param=every_second),
    "gradient expanded in rows": laid_out(*MATRIX, grad=same_in_rows),
    "gradient expanded in columns": laid_out(*MATRIX, grad=same_in_columns),
    "gradient transposed": laid_out(*MATRIX, grad=transposed),
    "channels_last 3x3, gradient plain": laid_out(*CONVOLUTION, param=channels_last),
    **{f"rows of {columns}": laid_out(-1, columns) for columns in (16, 64, 72, 264, 576)},
    "one row": laid_out(1, -1),
    "many of 64 x 64": many_small,
    "gradients of zero": laid_out(*MATRIX, grad=torch.zeros_like),
    TINY_GRADIENTS: laid_out(*MATRIX, grad=lambda grads: torch.full_like(grads, TINY)),
    "every second row zero": laid_out(*MATRIX, grad=half_of_the_rows),
}

# --- Cases


def case_of(name: str, layout: str, schedule: str, units: int) -> Case:
    """Compares a layout with the plain step of its state, and the plain step with AdamW's in float32."""
    state = STATES[name]

    def build(layout: str) -> Callable[[Source], Step]:
        options = {"weight_decay": WEIGHT_DECAY, "schedule": schedule, "backend": "cpu", **state.options}
        return lambda source: FusedAdamS(LAYOUTS[layout](source), **options).step

    columns: Row = {"layout": layout, "state": name, "dtype": str(state.dtype).removeprefix("torch.")}
    columns |= {"schedule": schedule, "elements": units * UNIT}
    if layout == "plain":
        peer = f"{PEER}, float32"
        builds = {peer: lambda _: adamw(LAYOUTS["plain"](source_of(FP32, units))).step, layout: build(layout)}
    else:
        builds = {"plain": build("plain"), layout: build(layout)}
    return Case(
        f"{name}, {layout}", columns, builds, REPEATS, work=partial(source_of, state.dtype, units), budget=BUDGET
    )


def summary(rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if row["contender"] != row["peer"]]

    def cell(row: Row) -> str:
        return f"[bold red]{row['ratio']:.2f}" if row["ratio"] > CLIFF else f"{row['ratio']:.2f}"

    title = f"Steps relative to the plain one, {rows[0]['schedule']} schedule, {rows[0]['elements']:,} elements"
    caption = f"plain: relative to {PEER} in float32. Red: above {CLIFF:g}."
    return crossed(rows, title, lambda row: row["layout"], lambda row: row["state"], cell, caption)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("cliffs", __doc__)
    parser.add_argument("--schedule", choices=("exact", "lagged"), default="exact", help="default: %(default)s")
    options = parser.parse_args(arguments)
    cases = [
        case_of(name, layout, options.schedule, QUICK_UNITS if options.quick else UNITS)
        for name in STATES
        for layout in LAYOUTS
        if (name, layout) != ("float16 masters", TINY_GRADIENTS)  # float16 ends at 6e-8
    ]
    carry_out(options, cases, summary)


if __name__ == "__main__":
    main()
