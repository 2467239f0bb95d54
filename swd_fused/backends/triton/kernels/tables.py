"""The tables that tell kernels about tensors, segments, groups and programs, and the functions that load elements."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from swd_fused.core import bucket
from swd_fused.core.values import HyperRow
from swd_fused.state.storage import PARAM_COLUMNS, SCALE_COLUMNS


class Columns(tl.constexpr):
    """Holds the columns of a table by name, and `columns`, their number.

    It is a tl.constexpr, since the key of Triton's cache includes these, but not other constants that a kernel reads
    through a module's name. The compiler looks for names in a constant's value, the interpreter in the constant.
    """

    def __init__(self, *names: str) -> None:
        super().__init__(namedtuple("Columns", [*names, "columns"])(*range(len(names) + 1)))
        self.__dict__.update(self.value._asdict())


# Columns of `tensors` (int64): the addresses of the parameter, its state and the scales of 8-bit moments; whether all
# operands but the gradient are aligned; the parameter group, the tensor's number among all, and how its elements are
# numbered (see state.rounding.ElementNumbers.rows). For 8-bit moments: the elements and the blocks of a row, 0 blocks
# if the tensor has no codes; and how its blocks are numbered (see state.eight_bit.BlockNumbers).
OPERANDS = ("param", *(name.removesuffix("s") for name in PARAM_COLUMNS), *SCALE_COLUMNS)
NUMBERS = ("group", "number", "first_number", "row_length", "row_pitch")
CODES = ("code_row_length", "blocks_per_row", "first_block", "block_pitch")
TENSOR = Columns(*OPERANDS, "aligned", *NUMBERS, *CODES)

# In `grads` (int64), the addresses of the gradients, which change from step to step, this marks a missing gradient.
NO_GRAD = tl.constexpr(bucket.NO_GRAD)

# Columns of `segments` (int64).
SEGMENT = Columns("tensor", "start", "length")

# Columns of `hyper` (float64).
HYPER = Columns(*HyperRow._fields)

# Columns of `slots` (float64), a row for each program: its share of the sums between the passes, and the mean and the
# factor that it computes from the totals.
SLOT = Columns("grad_sum", "carried", "fresh", "max_sum", "mean", "grad_factor")

PREPARED = ("bias_correction2", "carried", "inv_sqrt_bias_correction2", "step_size", "decay_factor")

# Columns of `sums` (float64), a row for each segment: the sum of its second moments, and its tensor's step count when
# they were summed. If the tensor has another one now, the sum is out of date. In lagged steps `weight` turns the sum
# into that of v^, 0 before the first step, so that the last program adds all rows without looking anything up. The
# others are prepared for a pass before it walks its segments, see `passes.prepare_sums`.
SUM = Columns("total", "step", "weight", *PREPARED)

# Columns of `limits` (float64): the number of elements, at least 1; max_grad_norm, infinite if nothing is clipped; 1 if
# steps with a norm that is not finite are skipped, else 0; the start of the keys of stochastic rounding.
LIMIT = Columns("numel", "max_grad_norm", "skip_nonfinite", "rounding_start")

# Columns of `last` (float64): the sum of v^ as the step before left it, and the number of its elements.
LAST = Columns("total", "numel")

# Columns of `results` (float64).
RESULT = Columns("exp_avg_sq_mean", "grad_norm", "skipped")


# --- From tables to elements

# The threads of a program. In a block each of them has 128 bits or more of the widest operand.
THREADS = tl.constexpr(128)

# The size of the widest access, in bytes.
ALIGNMENT = tl.constexpr(16)

# Pointers to the tables that each pass reads.
Tables = namedtuple("Tables", "steps tensors grads segments program_segments hyper")

# A stretch of a tensor: the tensor's index, pointers to its rows in the tables and to the address of its gradient, its
# first element and their number.
Segment = namedtuple("Segment", "tensor row grad hyper_row start count")

# Pointers to a segment's first elements. `weight` points to masters, to the remainders of bfloat16 parameters' masters,
# or to the parameters if there are no masters.
Operands = namedtuple("Operands", "param weight exp_avg exp_avg_sq max_exp_avg_sq ema_param grad")


@triton.jit
def segments_of_program(tables):
    """Returns the program's first segment, and the end of its segments."""
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
    """Returns whether the tensor has a gradient, and so takes part in the step."""
    return tl.load(segment.grad) != NO_GRAD


@triton.jit
def is_aligned(segment):
    """Returns whether all operands are aligned. A missing gradient counts as aligned, as gradients mostly are."""
    return (tl.load(segment.row + TENSOR.aligned) != 0) & (tl.load(segment.grad) % ALIGNMENT == 0)


@triton.jit
def elements(row, COLUMN: tl.constexpr, start, DTYPE: tl.constexpr):
    return tl.load(row + COLUMN).to(tl.pointer_type(DTYPE)) + start


@triton.jit
def operands_of(segment, CONFIG: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr):
    row, start = segment.row, segment.start
    param = elements(row, TENSOR.param, start, CONFIG.param)
    AVERAGE: tl.constexpr = tl.float64 if CONFIG.param == tl.float64 else tl.float32  # as in state/weights.py
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
# those that exist unless all do. A tile of blocks with codes has the blocks' offsets, and each element's place
# `inside` its block; see `eight_bit.tile_at`.
Tile = namedtuple("Tile", "offsets inside mask block row")


@triton.jit
def pointers(tensor, tile, VECTOR: tl.constexpr):
    """Returns pointers with the hint of alignment that 128-bit accesses need. It must be in the function that adds the
    offsets: on an address it is lost in the cast, and on a function's argument when that is inlined."""
    VECTOR_BYTES: tl.constexpr = tensor.dtype.element_ty.primitive_bitwidth // 8 * VECTOR
    if tile.inside is None:
        result = tl.multiple_of(tensor + tile.offsets, VECTOR_BYTES)
    else:
        result = tl.multiple_of((tensor + tile.offsets)[None, :, None] + tile.inside, [1, 1, VECTOR_BYTES])
    return result


@triton.jit
def load(tensor, tile, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Loads elements in COMPUTE; masked ones are 0. VECTOR is the number of elements in an access."""
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
    """Loads two blocks of 16-bit numbers from aligned 32-bit words: 128 bits for each thread, while sums take no more
    registers than in float32."""
    pairs = tl.load(tl.multiple_of(words + offsets, 16))
    low, high = pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)
    return low.to(DTYPE, bitcast=True).to(COMPUTE), high.to(DTYPE, bitcast=True).to(COMPUTE)
