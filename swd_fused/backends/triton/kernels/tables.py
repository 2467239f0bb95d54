"""What the kernels are told about tensors, segments, groups and programs, and how they reach elements by it."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from swd_fused.core import bucket
from swd_fused.core.values import HyperRow
from swd_fused.state.operands import PARAM_COLUMNS, SCALE_COLUMNS


class Columns(tl.constexpr):
    """The columns of a table by name, and `columns`, the number of them.

    A constant, since those are in the key of Triton's cache: constants of another module that a kernel reads through
    the module's name are not. The compiler looks for names in a constant's value, the interpreter in the constant.
    """

    def __init__(self, *names: str) -> None:
        super().__init__(namedtuple("Columns", [*names, "columns"])(*range(len(names) + 1)))
        self.__dict__.update(self.value._asdict())


# Of `tensors` (int64): the addresses of the parameter, its state and the scales of 8-bit moments; whether all operands
# but the gradient are aligned; the parameter group, the tensor's number among all, and how its elements are numbered
# (see state.rounding.ElementNumbers.rows). Of moments in 8 bits: the elements and the blocks of a row, 0 blocks if the
# tensor has no codes; and how its blocks are numbered (see eight_bit.BlockNumbers).
OPERANDS = ("param", *(name.removesuffix("s") for name in PARAM_COLUMNS), *SCALE_COLUMNS)
NUMBERS = ("group", "number", "first_number", "row_length", "row_pitch")
CODES = ("code_row_length", "blocks_per_row", "first_block", "block_pitch")
TENSOR = Columns(*OPERANDS, "aligned", *NUMBERS, *CODES)

# In `grads` (int64), the addresses of the gradients, which change from step to step: there is none.
NO_GRAD = tl.constexpr(bucket.NO_GRAD)

# Of `segments` (int64).
SEGMENT = Columns("tensor", "start", "length")

# Of `hyper` (float64).
HYPER = Columns(*HyperRow._fields)

# Of `slots` (float64), a row for each program: what it adds to the sums between the passes, and what it makes of the
# totals.
SLOT = Columns("grad_sum", "carried", "fresh", "max_sum", "mean", "grad_factor")

PREPARED = ("bias_correction2", "carried", "inv_sqrt_bias_correction2", "step_size", "decay_factor")

# Of `sums` (float64), a row for each segment: the sum of its second moments, and how many steps its tensor had taken
# when they were summed. If it has taken more since, somebody else has stepped the tensor. In lagged steps also what
# makes v^ of the sum, 0 before the first step, so that the last program has nothing to look up when it adds all rows.
# Then what a pass asks for of its segments before it goes through them, see `passes.prepare_sums`.
SUM = Columns("total", "step", "weight", *PREPARED)

# Of `limits` (float64): the number of elements, at least 1; max_grad_norm, infinite if nothing is clipped; whether
# steps with a norm that is not finite are skipped, 1 or 0; what the keys of stochastic rounding start from.
LIMIT = Columns("numel", "max_grad_norm", "skip_nonfinite", "rounding_start")

# Of `last` (float64): the sum of v^ as the step before left it, and the number of its elements.
LAST = Columns("total", "numel")

# Of `results` (float64).
RESULT = Columns("exp_avg_sq_mean", "grad_norm", "skipped")


# --- From tables to elements

# Of a program. Blocks are so long that each has 128 bits of the widest operand.
THREADS = tl.constexpr(128)

# Of the widest access, in bytes.
ALIGNMENT = tl.constexpr(16)

# Pointers to what each pass reads about tensors and programs.
Tables = namedtuple("Tables", "steps tensors grads segments program_segments hyper")

# A stretch of a tensor: the tensor's index, pointers to its rows in the tables and to the address of its gradient, its
# first element and their number.
Segment = namedtuple("Segment", "tensor row grad hyper_row start count")

# Pointers to a segment's first elements. `weight` is what is updated: masters, what these are beside bfloat16
# parameters, or parameters themselves.
Operands = namedtuple("Operands", "param weight exp_avg exp_avg_sq max_exp_avg_sq ema_param grad")


@triton.jit
def segments_of_program(tables):
    """The first one, and the end of them."""
    first = tables.program_segments + tl.program_id(0)
    return tl.load(first), tl.load(first + 1)


@triton.jit
def segment_at(tables, index):
    place = tables.segments + index * SEGMENT.columns
    tensor = tl.load(place + SEGMENT.tensor)
    row = tables.tensors + tensor * TENSOR.columns
    hyper_row = tables.hyper + tl.load(row + TENSOR.group) * HYPER.columns
    start, count = tl.load(place + SEGMENT.start), tl.load(place + SEGMENT.length).to(tl.int32)
    return Segment(tensor, row, tables.grads + tensor, hyper_row, start, count)


@triton.jit
def has_grad(segment):
    """Whether the tensor takes part in the step."""
    return tl.load(segment.grad) != NO_GRAD


@triton.jit
def is_aligned(segment):
    """Whether all operands are. A gradient that is not there counts as aligned, as gradients mostly are."""
    return (tl.load(segment.row + TENSOR.aligned) != 0) & (tl.load(segment.grad) % ALIGNMENT == 0)


@triton.jit
def elements(row, COLUMN: tl.constexpr, start, DTYPE: tl.constexpr):
    return tl.load(row + COLUMN).to(tl.pointer_type(DTYPE)) + start


@triton.jit
def operands_of(segment, CONFIG: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr):
    row, start = segment.row, segment.start
    param = elements(row, TENSOR.param, start, CONFIG.param)
    AVERAGE: tl.constexpr = tl.float64 if CONFIG.param == tl.float64 else tl.float32  # state.averages.average_dtype
    return Operands(
        param,
        elements(row, TENSOR.master, start, CONFIG.weight) if CONFIG.master else param,
        elements(row, TENSOR.exp_avg, start, EXP_AVG),
        elements(row, TENSOR.exp_avg_sq, start, EXP_AVG_SQ),
        elements(row, TENSOR.max_exp_avg_sq, start, CONFIG.averaged),
        elements(row, TENSOR.ema_param, start, AVERAGE) if CONFIG.averages else param,
        elements(segment.grad, 0, start, CONFIG.grad),
    )


# Elements that are taken at once, counted from the segment's first one. A block has their `offsets`, and a `mask` of
# those that exist unless all do. A tile of blocks that have codes has the blocks' offsets, and each element's place
# `inside` its block; see `eight_bit.tile_at`.
Tile = namedtuple("Tile", "offsets inside mask block row")


@triton.jit
def pointers(tensor, tile, VECTOR: tl.constexpr):
    """128-bit accesses need a hint that pointers are aligned, in the very function that adds the offsets: on an address
    it is lost in the cast, and on the argument of a function when that is inlined."""
    VECTOR_BYTES: tl.constexpr = tensor.dtype.element_ty.primitive_bitwidth // 8 * VECTOR
    if tile.inside is None:
        result = tl.multiple_of(tensor + tile.offsets, VECTOR_BYTES)
    else:
        result = tl.multiple_of((tensor + tile.offsets)[None, :, None] + tile.inside, [1, 1, VECTOR_BYTES])
    return result


@triton.jit
def load(tensor, tile, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Elements that do not exist are 0. VECTOR is the number of elements in an access."""
    if tile.mask is None:
        values = tl.load(pointers(tensor, tile, VECTOR))
    else:
        values = tl.load(pointers(tensor, tile, VECTOR), mask=tile.mask, other=0)
    return values.to(COMPUTE)


@triton.jit
def store(tensor, values, tile, VECTOR: tl.constexpr):
    tl.store(pointers(tensor, tile, VECTOR), values.to(tensor.dtype.element_ty), mask=tile.mask)


@triton.jit
def load_pairs(words, offsets, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """Two blocks of 16-bit numbers, from aligned 32-bit words: 128 bits for each thread, and for sums of them no more
    registers than in float32."""
    pairs = tl.load(tl.multiple_of(words + offsets, 16))
    low, high = pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)
    return low.to(DTYPE, bitcast=True).to(COMPUTE), high.to(DTYPE, bitcast=True).to(COMPUTE)
