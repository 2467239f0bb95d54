"""What the kernels are told about tensors, segments, groups and programs: the columns of each table."""

from __future__ import annotations

from collections import namedtuple

import triton.language as tl

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


# Of `tensors` (int64): the addresses of the operands; whether all of them are aligned; the parameter group, the
# tensor's number among all, and how its elements are numbered (see state.rounding.ElementNumbers.rows).
OPERANDS = ("param", "grad", *(name.removesuffix("s") for name in PARAM_COLUMNS))
TENSOR = Columns(*OPERANDS, "aligned", "group", "number", "first_number", "row_length", "row_pitch")

# Of what is known of a tensor's codes (int64), where any tensor's moments are kept in 8 bits: the addresses of the
# scales; the elements and the blocks of a row, 0 blocks if the tensor has no codes; how its blocks are numbered (see
# eight_bit.BlockNumbers). In memory these rows are before `tensors`, the first tensor's last: kernels that know nothing
# of codes need not know of them.
CODEC = Columns(*SCALE_COLUMNS, "row_length", "blocks_per_row", "first_block", "block_pitch")

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
