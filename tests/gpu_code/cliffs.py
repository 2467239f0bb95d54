"""Where a step on a GPU costs more than the plain one: bytes, sectors, instructions and launches, counted without one.

    TRITON_INTERPRET=0 python -m tests.gpu_code.cliffs

The compiled kernels are executed in the PTX emulator, by one program, since others would count turns of a barrier. The
host's side of the step runs as it is, with launches left out: which tensors it copies, and how often it launches. Of a
copy each byte counts that is read and written and each sector once, as if caches were perfect, and no instruction.
Nothing here is a time. Layouts, shapes and values are varied one at a time, each for all dtypes and states, and related
to the plain step of the same dtype and state.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from triton import __version__ as triton_version

import swd_fused
from benchmarks.conditions import write_rows
from swd_fused import FusedAdamS, backends
from swd_fused.backends.triton import launch as triton_launch
from swd_fused.backends.triton import plan as triton_plan
from swd_fused.backends.triton.operands import GRADS, Operands, columns_of, scales_of
from swd_fused.core.bucket import Bucket

from .emulated_step import EmulatedStep
from .offline_compiler import CONFIGURATIONS, submit
from .ptx_memory import SECTOR, Statistics
from .ptx_state import WARP

ARCH = 90
KERNELS = {"exact": "exact_step_kernel", "lagged": "lagged_step_kernel"}
MUCH = 1.5  # times the plain step: marked in the table

Row = dict[str, Any]
Shape = tuple[int, ...]


class State(NamedTuple):
    """A configuration of the offline compiler, and the options that bring it about."""

    configuration: str
    options: dict[str, Any]


STATES = {
    "float32": State("fp32", {}),
    "bfloat16, masters": State("bf16 with masters", {"master_weights": True}),
    "bfloat16, stochastic": State("bf16 rounded by chance", {"stochastic_rounding": True}),
    "float16": State("fp16", {}),
    "float64": State("fp64", {}),
    "float32, 8 bits": State("fp32 in 8 bits", {"state_dtype": "8bit"}),
    "bfloat16, 8 bits": State("bf16 in 8 bits", {"state_dtype": "8bit", "stochastic_rounding": True}),
    "float32, amsgrad": State("fp32 amsgrad", {"amsgrad": True}),
}

# All of 65,536 elements, or a few less.
PLAIN: list[Shape] = [(64, 1024)]
SHAPES: dict[str, list[Shape]] = {
    "one vector": [(65536,)],
    **{f"rows of {columns}": [(65536 // columns, columns)] for columns in (16, 64, 72, 264, 576)},
    "16 tensors of 16 x 256": [(16, 256)] * 16,
    "256 tensors of 256": [(256,)] * 256,
}


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.view(64, 64, 4, 4).contiguous(memory_format=torch.channels_last)


def rows_with_gaps(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]


def every_second(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, 1)[:, ::2]


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


def plain(tensor: Tensor) -> Tensor:
    return tensor


class Layout(NamedTuple):
    """How a parameter and its gradient lie, and by how many elements everything is away from an aligned address."""

    param: Callable[[Tensor], Tensor]
    grad: Callable[[Tensor], Tensor]
    offset: int = 0


LAYOUTS = {
    "transposed": Layout(transposed, transposed),
    "channels_last": Layout(channels_last, channels_last),
    "parameter: gaps between rows": Layout(rows_with_gaps, plain),
    "parameter: every second element": Layout(every_second, plain),
    "gradient: gaps between rows": Layout(plain, rows_with_gaps),
    "gradient: expanded": Layout(plain, expanded),
    "gradient: transposed": Layout(plain, transposed),
    "parameter: transposed": Layout(transposed, plain),
    "not aligned": Layout(plain, plain, offset=1),
}

# What the gradients of two halves are multiplied by, each of which is a segment.
HALVES: list[Shape] = [(32, 1024)] * 2
VALUES = {"zeros": (0.0, 0.0), "half of the rows zero": (0.0, 1.0), "1e-21": (1e-21, 1e-21)}


class Cell(NamedTuple):
    factor: str  # "plain", "layout", "shape" or "values"
    case: str
    state: str
    schedule: str = "exact"


def cells() -> list[Cell]:
    """The plain steps first. Values matter in both passes, so also in lagged steps; those share the rest."""
    plain_cells = [Cell("plain", "64 x 1024", state, schedule) for schedule in KERNELS for state in STATES]
    layouts = [Cell("layout", case, state) for case in LAYOUTS for state in STATES]
    shapes = [Cell("shape", case, state) for case in SHAPES for state in STATES]
    values = [Cell("values", case, state, schedule) for schedule in KERNELS for case in VALUES for state in STATES]
    return plain_cells + layouts + shapes + values


@dataclass
class Costs:
    bytes: int = 0
    sectors: int = 0
    instructions: int = 0
    launches: int = 0
    copies: int = 0
    copied_bytes: int = 0

    def clear(self) -> None:
        vars(self).update(vars(Costs()))


def counted(cell: Cell) -> tuple[Costs, int]:
    """Returns what a step costs, and of how many elements it is."""
    shapes = {"shape": SHAPES.get(cell.case, []), "values": HALVES}.get(cell.factor, PLAIN)
    layout = LAYOUTS[cell.case] if cell.factor == "layout" else Layout(plain, plain)
    factors = VALUES[cell.case] if cell.factor == "values" else (1.0,) * len(shapes)
    state = STATES[cell.state]
    params, grads = tensors(tuple(shapes), factors, state.configuration)
    costs = counted_on_host([layout.param(p) for p in params], [layout.grad(g) for g in grads], state, cell.schedule)
    kernel = emulated(tuple(shapes), factors, state.configuration, KERNELS[cell.schedule], layout.offset)
    costs.bytes += kernel.bytes
    costs.sectors += kernel.loads.sectors + kernel.stores.sectors
    costs.instructions += WARP * kernel.warp_instructions
    return costs, sum(map(math.prod, shapes))


def tensors(
    shapes: Sequence[Shape], factors: Sequence[float], configuration: str
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Returns parameters, and gradients multiplied by the factors."""
    dtypes, generator = CONFIGURATIONS[configuration].dtypes, torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtypes.param) for shape in shapes]
    grads = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return params, [(factor * grad).to(dtypes.grad) for factor, grad in zip(factors, grads, strict=True)]


@functools.cache
def emulated(
    shapes: tuple[Shape, ...], factors: tuple[float, ...], configuration: str, kernel: str, offset: int
) -> Statistics:  # fmt: skip
    """Kept, since the kernels walk tensors of all layouts, or their copies, from end to end."""
    params, grads = tensors(shapes, factors, configuration)
    groups = [{"params": range(len(params))}]
    model = EmulatedStep(configuration, params, groups, programs=1, arch=ARCH, offset=offset)
    model.set_grads(grads)
    return model.launch(kernel)


def counted_on_host(params: list[Tensor], grads: list[Tensor], state: State, schedule: str) -> Costs:
    """Returns the copies and the launches of a step, when the first ones have set everything up."""
    parameters = [torch.nn.Parameter(param) for param in params]
    for parameter, param, grad in zip(parameters, params, grads, strict=True):
        assert parameter.stride() == param.stride()
        parameter.grad = grad.view_as(parameter) if grad.shape != parameter.shape else grad
    costs = Costs()
    with without_launches(costs), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = FusedAdamS(parameters, schedule=schedule, **state.options)
        for _ in range(3):
            costs.clear()
            optimizer.step()
    return costs


@contextmanager
def without_launches(costs: Costs) -> Iterator[None]:
    """The Triton backend for CPU tensors: launches are counted instead, and copies counted as they are made."""

    def launch(self: object, programs: int, results: Tensor, *args: object) -> None:
        results.fill_(1.0)  # a mean that warns of nothing
        costs.launches += 1

    def add_copies(bucket: Bucket, copies: list[tuple[int, int, Tensor]]) -> None:
        columns = [*columns_of(bucket), *scales_of(bucket)]
        for column, tensor, copy in copies:
            for side in (columns[column][tensor], copy):
                moved = distinct(side, side.itemsize) * side.itemsize
                costs.bytes += moved
                costs.copied_bytes += moved
                costs.sectors += distinct(side, SECTOR)
            costs.copies += 1
            costs.launches += 1

    class Counted(Operands):
        def begin(self, bucket: Bucket) -> None:
            super().begin(bucket)
            add_copies(bucket, self._copies)

        def write_back(self, bucket: Bucket) -> None:
            super().write_back(bucket)
            add_copies(bucket, [copied for copied in self._copies if copied[0] != GRADS])

    triton = backends.load_triton_backend()
    with (
        patch.object(triton_launch.Launcher, "__call__", launch),
        patch.object(triton_plan, "programs_on", lambda *_: 1),
        patch.object(triton_plan, "Operands", Counted),
        patch.object(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(warp_size=32)),
        patch.object(backends, "choose", lambda *_: triton),
    ):
        yield


def distinct(tensor: Tensor, unit: int) -> int:
    """Returns how many units of memory, of so many bytes, a tensor touches."""
    places = np.zeros((1,) * max(1, tensor.dim()), np.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dim] = size
        places = places + (np.arange(size) * stride).reshape(shape)
    return np.unique(places * tensor.itemsize // unit).size


def row_of(cell: Cell, costs: Costs, numel: int, base: Row | None) -> Row:
    each: Row = {
        "bytes_per_element": round(costs.bytes / numel, 3),
        "sector_bytes_per_element": round(SECTOR * costs.sectors / numel, 3),
        "instructions_per_element": round(costs.instructions / numel, 2),
        "launches": costs.launches,
    }
    return {
        **cell._asdict(),
        "elements": numel,
        **each,
        "copies": costs.copies,
        "copied_bytes_per_element": round(costs.copied_bytes / numel, 3),
        **{f"{key}_ratio": round(value / (base or each)[key], 3) for key, value in each.items()},
        "counted_by": f"PTX emulator, sm_{ARCH}; copies by their bytes, without instructions; no GPU",
        "triton": triton_version,
        "torch": torch.__version__,
        "swd_fused": swd_fused.__version__,
    }


def rows_of(wanted: Sequence[Cell], advance: Callable[[], None] = lambda: None) -> list[Row]:
    """With the plain steps that they are related to."""
    for cell in wanted:
        submit(KERNELS[cell.schedule], ARCH, STATES[cell.state].configuration)
    rows: list[Row] = []
    bases: dict[tuple[str, str], Row] = {}
    for cell in wanted:
        row = row_of(cell, *counted(cell), bases.get((cell.state, cell.schedule)))
        if cell.factor == "plain":
            bases[cell.state, cell.schedule] = row
        rows.append(row)
        advance()
    return rows


def table(rows: Sequence[Row]) -> Table:
    result = Table(title="Counted in the PTX emulator, nothing timed", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "case", "dtype and state", "schedule"):
        result.add_column(heading, no_wrap=True)
    for heading in ("bytes", "in sectors", "instructions", "launches", "copies", "ratios of these four", "times"):
        result.add_column(heading, justify="right", no_wrap=True)
    kinds = ("bytes_per_element", "sector_bytes_per_element", "instructions_per_element", "launches")
    for row in rows:
        ratios = [row[f"{kind}_ratio"] for kind in kinds]
        result.add_row(
            *(row[key] for key in ("factor", "case", "state", "schedule")),
            *(f"{row[kind]:.1f}" for kind in kinds[:3]),
            str(row["launches"]),
            str(row["copies"]),
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            f"[bold]{max(ratios[:3]):.2f}[/]" if max(ratios[:3]) > MUCH else "",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_code.cliffs", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("results/cliffs_triton"), metavar="DIR", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 interprets kernels, so there is no code to count. Set it to 0.")
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        wanted = cells()
        task = progress.add_task("cells", total=len(wanted))
        rows = rows_of(wanted, lambda: progress.advance(task))
    console.print(table(rows))
    csv_path = options.out / "cliffs_triton.csv"
    write_rows(csv_path, rows)
    console.print(f"Wrote {csv_path}", soft_wrap=True)


if __name__ == "__main__":
    main()
